"""save_checkpoint and load_checkpoint: from any number of ranks to any other the same bits, and training goes on as if nothing were."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import zero3
from tests.huggingface.test_load_pretrained_memory import resident_bytes
from tests.support import disk
from tests.support.checkpoints import LAYERS, OPTIMIZERS, assert_same, content_of, on_ranks, plain, train
from tests.support.processes import Rank
from tests.support.processes import on_ranks as on_processes
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import assert_at_rest, assert_close, process_group
from zero3.checkpoint import safetensors_files

Snapshot = dict[str, Any]


def snapshot(model: Any, optimizer: torch.optim.Optimizer) -> Snapshot:
    optimizer_state = zero3.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    return {"model": zero3.full_state_dict(model, rank0_only=False), "optimizer": optimizer_state}


def save(path: Path, model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator, **options: Any) -> tuple[Snapshot, Snapshot]:
    """What is saved after three steps, and what two more make of it."""
    train(model, optimizer, range(3))
    zero3.save_checkpoint(path, model, optimizer, **options)
    saved = snapshot(model, optimizer)
    train(model, optimizer, range(3, 5))
    assert_at_rest(model)
    return saved, snapshot(model, optimizer)


def load(path: Path, model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> tuple[Snapshot, Snapshot]:
    """What is loaded over what one other step left behind, and what two more make of it."""
    train(model, optimizer, [7])
    assert zero3.load_checkpoint(path, model, optimizer) is None
    loaded = snapshot(model, optimizer)
    train(model, optimizer, range(3, 5))
    assert_at_rest(model)
    return loaded, snapshot(model, optimizer)


def numbers(found: Snapshot) -> dict[str, Tensor]:
    state = {f"{name}/{key}": value for name, of in found["optimizer"]["state"].items() for key, value in of.items()}
    return found["model"] | {name: value for name, value in state.items() if isinstance(value, Tensor)}


def plain_run(optimizer_name: str) -> dict[str, Tensor]:
    """The parameters after five steps of plain torch."""
    model, optimizer = plain(optimizer_name)
    train(model, optimizer, range(5))
    return model.state_dict()


@pytest.mark.parametrize("to", [1, 2, 3, 4])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_load_checkpoint_from_any_number_of_ranks_to_any_other(world_size: int, to: int, tmp_path: Path) -> None:
    layers = list(LAYERS)[(world_size + to) % 3], list(LAYERS)[to % 3]
    saved, uninterrupted = on_ranks(world_size, partial(save, tmp_path / "runs" / "one"), layers=layers[0])[0]
    for loaded, after in on_ranks(to, partial(load, tmp_path / "runs" / "one"), layers=layers[1]):
        assert_same(loaded, saved)
        if (world_size, layers[0]) == (to, layers[1]):
            assert_same(after, uninterrupted)
        assert_close(numbers(after), numbers(uninterrupted), 1e-12, "two more steps")
        assert_close(after["model"], plain_run("AdamW"), 1e-12, "five steps of plain torch")


@pytest.mark.parametrize(("world_size", "to"), [(2, 3), (3, 1)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_load_checkpoint_of_every_optimizer(name: str, world_size: int, to: int, tmp_path: Path) -> None:
    saved, uninterrupted = on_ranks(world_size, partial(save, tmp_path), optimizer=name)[0]
    for loaded, after in on_ranks(to, partial(load, tmp_path), optimizer=name):
        assert_same(loaded, saved)
        assert_close(numbers(after), numbers(uninterrupted), 1e-12, "two more steps")
        assert_close(after["model"], plain_run(name), 1e-12, "five steps of plain torch")


def test_load_checkpoint_reads_a_ranks_own_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte of the files once for its hash; then values: no rank reads what it does not hold."""
    on_ranks(3, partial(save, tmp_path))
    reads: list[int] = []
    read = safetensors_files.SafetensorsFiles._read

    def counting(self: Any, name: str, *place: Any) -> None:
        if name.startswith(("parameter:", "state:")):
            reads.append(place[-1].nbytes)
        read(self, name, *place)

    monkeypatch.setattr(safetensors_files.SafetensorsFiles, "_read", counting)
    on_ranks(2, partial(load, tmp_path))
    model, optimizer = plain("AdamW")
    train(model, optimizer, range(1))
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    state = sum(v.nbytes for of in optimizer.state.values() for k, v in of.items() if k != "step")
    idle = 2 * sum(block.idle.nbytes for block in model.blocks)  # in a chunk, what no gradient has reached has zeros in plain torch's place
    assert sum(reads) == parameters + state + idle


def test_load_checkpoint_brings_extra_back_as_it_was(tmp_path: Path) -> None:
    """Rank 0's counts. Tensors, tuples, counters and numbers of all kinds keep their types; state dicts of torch's own classes go."""

    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> tuple[Any, Any, dict[str, Any]]:
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
        scaler = torch.amp.GradScaler("cpu")
        train(model, optimizer, range(1))
        schedule.step()
        extra = {
            "step": 3, "schedule": schedule.state_dict(), "scaler": scaler.state_dict(), "rank": group.rank, "none": None,
            "tensors": [torch.arange(3), torch.tensor(1.5), torch.empty(0, 2), torch.randn(3, 2).bfloat16().t()],
            "floats": (0.1, float("inf"), -0.0), 7: ("a", {"$tensor": 1}), "text": "ä\n", "big": 2**80,
        }  # fmt: skip
        zero3.save_checkpoint(tmp_path, model, optimizer, extra=extra)
        other = torch.optim.lr_scheduler.MultiStepLR(OPTIMIZERS["AdamW"](zero3.get_trainable_chunk(model)), [1])
        found = zero3.load_checkpoint(tmp_path, model)
        other.load_state_dict(found["schedule"])
        return found, extra, other.state_dict()

    results = on_ranks(2, body)
    for found, _, schedule in results:
        assert_same(found, results[0][1])
        assert schedule == results[0][1]["schedule"]
        assert isinstance(found["schedule"]["milestones"], Counter)


@pytest.mark.parametrize("background", [False, True])
def test_save_checkpoint_of_views_that_stand_for_other_numbers_than_their_memory(background: bool, tmp_path: Path) -> None:
    """Those of `conj()`, and of its imaginary part. `save_pretrained` writes them, too."""
    conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
    views = {"conjugate": conjugate, "imaginary": conjugate.imag}
    values = {name: view.resolve_conj().resolve_neg() for name, view in views.items()}

    def made() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2))
        for name, value in values.items():
            model.register_buffer(name, torch.zeros_like(value))
        return zero3.shard(model, nn.Linear)

    model, other = made(), made()
    model._buffers.update(views)
    zero3.save_checkpoint(tmp_path / "run", model, extra=views, background=background).wait()
    assert_same(zero3.load_checkpoint(tmp_path / "run", other), values)
    assert_same(dict(other.named_buffers()), values)
    zero3.save_pretrained(model, tmp_path / "pretrained")
    found = load_file(tmp_path / "pretrained" / "model.safetensors")
    assert_same({name: found[name] for name in values}, values)


def test_load_checkpoint_lets_random_generators_go_on(tmp_path: Path) -> None:
    """One rank: threads would share them."""

    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        numpy = pytest.importorskip("numpy")
        draw = lambda: (torch.rand(3).tolist(), random.random(), float(numpy.random.rand()), random.gauss(0, 1))  # noqa: E731
        draw()
        zero3.save_checkpoint(tmp_path, model)
        expected = draw()
        zero3.load_checkpoint(tmp_path, model)
        assert draw() == expected

    with torch.random.fork_rng(devices=[]):
        on_ranks(1, body)


def test_save_checkpoint_writes_safetensors_and_no_pickle(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    on_ranks(2, partial(save, tmp_path))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    files = sorted(tmp_path.glob("data-*/*"))
    assert sorted(path.name for path in files) == sorted(manifest["files"])
    tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert any(name.startswith("state:exp_avg:embed.weight[") for name in tensors)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes()[:2] == b"\x80\x04"]


def test_save_checkpoint_in_the_background_while_steps_go_on(tmp_path: Path) -> None:
    """What is saved is what there was at the call. It appears at `wait()`, or when the model is next saved or loaded."""
    may_write = threading.Event()

    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> tuple[Snapshot, Snapshot]:
        train(model, optimizer, range(2))
        first = zero3.save_checkpoint(tmp_path / "one", model, optimizer, background=True)
        saved = snapshot(model, optimizer)
        train(model, optimizer, range(2, 4))
        assert not (tmp_path / "one" / "manifest.json").exists()
        may_write.set()
        first.wait()
        first.wait()
        assert (tmp_path / "one" / "manifest.json").exists()
        zero3.save_checkpoint(tmp_path / "two", model, optimizer, background=True)
        train(model, optimizer, range(4, 5))
        zero3.save_checkpoint(tmp_path / "three", model, optimizer, background=True, keep_last=3)
        assert zero3.latest_checkpoint(tmp_path) == tmp_path / "two"
        zero3.load_checkpoint(tmp_path / "one", model, optimizer)
        assert zero3.latest_checkpoint(tmp_path) == (tmp_path / "three")
        return saved, snapshot(model, optimizer)

    with disk.held(may_write):
        found = on_ranks(2, body)
    for saved, loaded in found:
        assert_same(loaded, saved)


def saved_memory(rank: Rank, directory: str) -> tuple[int, int, int]:
    """By how much a process grew at most while it saved 48 MB of state of its own, and while it loaded them; and the state's bytes."""

    def made(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = zero3.Zero3Sequential([zero3.Zero3Layer(nn.Linear(width, width)) for _ in range(8)])
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model))
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    def grown(work: Callable[[], object]) -> int:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        before = resident_bytes("VmRSS")
        work()
        return resident_bytes("VmHWM") - before

    small = made(4)
    zero3.save_checkpoint(f"{directory}/small", *small)  # what torch imports late is no part of it
    zero3.load_checkpoint(f"{directory}/small", *small)
    model, optimizer = made(1024)
    state = sum(value.nbytes for of in optimizer.state.values() for value in of.values())
    saving = grown(lambda: zero3.save_checkpoint(f"{directory}/large", model, optimizer))
    optimizer.state.clear()
    return saving, grown(lambda: zero3.load_checkpoint(f"{directory}/large", model, optimizer)), state


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's account of a process's memory")
def test_load_checkpoint_takes_memory_for_the_new_state_and_one_buffer(tmp_path: Path) -> None:
    for grown, loading, state in on_processes(2, saved_memory, str(tmp_path), fresh=True):
        assert state > 30 * 2**20
        assert grown < 4 * 2**20, grown / 2**20
        assert loading < state + 16 * 2**20 + 4 * 2**20, (loading / 2**20, state / 2**20)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_step_of_a_parameter_without_dimensions_is_a_number(world_size: int, tmp_path: Path) -> None:
    """Its moments have no dimensions either, but they are its elements; a number beside the elements of a longer one is none."""

    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    models = [Scaled() for _ in range(world_size)]

    def body(group: ThreadCommunicator) -> None:
        model = zero3.Zero3Layer(models[group.rank], process_group=process_group(group))
        optimizer = torch.optim.AdamW(zero3.param_groups(model, lambda name, info: {"whole": True}), lr=0.1)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        zero3.save_checkpoint(tmp_path, model, optimizer)
        before = zero3.full_optimizer_state_dict(model, optimizer, rank0_only=False)
        zero3.load_checkpoint(tmp_path, model, optimizer)
        assert_same(zero3.full_optimizer_state_dict(model, optimizer, rank0_only=False), before)

    run_ranks(world_size, body)
    found = content_of(tmp_path)["optimizer"]["state"]  # each time names, and what their state is
    assert {name for names, *_ in found for name in names} == {"scale", "weight", "bias"}
    for names, elements, scalars, _ in found:
        assert scalars["step"]["$tensor"][:2] == ["float32", 1.0], names
        assert set(elements) == {"exp_avg", "exp_avg_sq"} and set(scalars) == {"step"}, names


class Table(nn.Module):
    """A buffer that no checkpoint holds, and that the module computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(16.0))
        self.register_buffer("table", torch.arange(16.0), persistent=False)

    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(16.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.table


def test_load_checkpoint_again_after_a_read_has_failed_on_one_rank(tmp_path: Path) -> None:
    """The other rank had read all, and computed the buffer: the second load finds it there, and computes it on one rank alone."""
    expected = Table()(torch.ones(16))
    run_ranks(2, lambda group: zero3.save_checkpoint(tmp_path / "c", zero3.Zero3Layer(Table(), process_group=group)))
    thread = threading.local()

    def failing(file: FileIO, offset: int, into: memoryview) -> int:
        if getattr(thread, "fails", False) and len(into) == 32:  # its half of the weight
            raise OSError(5, "Input/output error")
        return disk.read(file, offset, into)

    def body(group: ThreadCommunicator) -> Tensor:
        with torch.device("meta"):
            plain = Table()
        model = zero3.Zero3Layer(plain, device="cpu", process_group=group)
        thread.fails = group.rank == 1
        with pytest.raises(RuntimeError, match=r"rank 1: reading .* failed: .*What it was to fill is unloaded now: load again"):
            zero3.load_checkpoint(tmp_path / "c", model)
        with pytest.raises(RuntimeError, match="has no values yet"):
            model(torch.ones(16))
        thread.fails = False
        zero3.load_checkpoint(tmp_path / "c", model)
        found: Tensor = model(torch.ones(16))
        return found.detach()

    with disk.reading(failing):
        for found in run_ranks(2, body):
            assert torch.equal(found, expected)
