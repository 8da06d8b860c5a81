"""save_checkpoint and load_checkpoint: from any number of ranks to any other the same bits, and training goes on as if nothing were."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.huggingface.test_load_pretrained_memory import resident_bytes
from tests.support.checkpoints import LAYERS, LINEAR, OPTIMIZERS, assert_same, odd, on_ranks, plain, train
from tests.support.processes import Rank
from tests.support.processes import on_ranks as on_processes
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import assert_at_rest, assert_close
from zero3.checkpoint import file_operations, manifest, safetensors_files
from zero3.checkpoint import save as saving
from zero3.checkpoint.safetensors_writing import BLOCK_BYTES

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
    read = safetensors_files.SafetensorsFiles.read

    def counting(self: Any, stored: Any, start: int, target: Tensor) -> None:
        if stored.name.startswith(("parameter:", "state:")):
            reads.append(target.nbytes)
        read(self, stored, start, target)

    monkeypatch.setattr(safetensors_files.SafetensorsFiles, "read", counting)
    on_ranks(2, partial(load, tmp_path))
    model, optimizer = plain("AdamW")
    train(model, optimizer, range(1))
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    assert sum(reads) == parameters + sum(v.nbytes for of in optimizer.state.values() for k, v in of.items() if k != "step")


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


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, lambda: 0, torch.float32, {"deep": [1, ({"er": b"x"},)]}, Path("a"), 1j],
    ids=lambda value: type(value).__name__,
)
def test_save_checkpoint_refuses_what_only_pickle_could_hold(value: Any, tmp_path: Path) -> None:
    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        with pytest.raises(TypeError, match=r"extra.* is a .*never a pickle"):
            zero3.save_checkpoint(tmp_path / "a", model, optimizer, extra=value if group.rank == 0 else None)

    on_ranks(2, body)
    assert not list(tmp_path.iterdir())


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


def test_save_checkpoint_may_leave_frozen_parameters_out(tmp_path: Path) -> None:
    """They stay as they are; a model where they have other values, or are trained, is refused."""

    def save_without(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> dict[str, Tensor]:
        train(model, optimizer, range(2))
        zero3.save_checkpoint(tmp_path, model, optimizer, frozen=False)
        return zero3.full_state_dict(model)

    def load_without(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> dict[str, Tensor]:
        zero3.load_checkpoint(tmp_path, model, optimizer)
        return zero3.full_state_dict(model)

    def with_other_biases() -> nn.Module:
        model = odd()
        for block in model.blocks:
            nn.init.constant_(block.linear.bias, 3.0)
        return model

    def thawed() -> nn.Module:
        model = odd()
        model.blocks[1].linear.bias.requires_grad_(True)
        return model

    def another_base(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        with pytest.raises(ValueError, match=r"over another base .* 3 of 6 frozen parameters .*: blocks\.0\.linear\.bias"):
            zero3.load_checkpoint(tmp_path, model, optimizer)

    def refused(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        with pytest.raises(ValueError, match=r"without frozen parameters, .* trained here: blocks\.1\.linear\.bias"):
            zero3.load_checkpoint(tmp_path, model)

    saved = on_ranks(2, save_without)[0]
    data = b"".join(path.read_bytes() for path in tmp_path.rglob("*.safetensors"))
    assert b"linear.weight" in data and b"linear.bias" not in data and b"order" not in data
    assert_same(on_ranks(3, load_without)[0], saved)
    on_ranks(3, another_base, build=with_other_biases)
    on_ranks(2, refused, build=thawed)


def test_load_checkpoint_fills_a_model_on_meta(tmp_path: Path) -> None:
    """Buffers that no checkpoint holds come from the model's own initialiser; a missing one is named by the first forward."""

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return built()

    def built() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))

    def save_it(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> Tensor:
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(group.rank)))
        zero3.save_checkpoint(tmp_path, model)
        return model.eval()(torch.ones(1, 5)).detach()

    def load_it(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> Tensor:
        zero3.load_checkpoint(tmp_path, model)
        return model.eval()(torch.ones(1, 5)).detach()

    def refused(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        with pytest.raises(RuntimeError, match=r"0\.weight.*have no values yet"):
            zero3.save_checkpoint(tmp_path, model)

    saved = on_ranks(2, save_it, build=built, layers=LINEAR)
    assert not torch.equal(saved[0], saved[1]), "each rank has seen other batches"
    for rank, found in enumerate(on_ranks(2, load_it, build=on_meta, layers=LINEAR)):
        assert torch.equal(found, saved[rank]), "buffers are each rank's own"
    assert torch.equal(on_ranks(3, load_it, build=on_meta, layers=LINEAR)[2], saved[0])
    on_ranks(2, refused, build=on_meta, layers=LINEAR)


def test_save_checkpoint_writes_safetensors_and_no_pickle(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    on_ranks(2, partial(save, tmp_path))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    files = sorted(tmp_path.glob("data-*/*"))
    assert sorted(path.name for path in files) == sorted(manifest["files"])
    tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert any(name.startswith("state:exp_avg:embed.weight[") for name in tensors)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes()[:2] == b"\x80\x04"]


def test_save_checkpoint_in_the_background_while_steps_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved is what there was at the call. It appears at `wait()`, or when the model is next saved or loaded."""
    may_write = threading.Event()
    write_file = saving.write_file
    monkeypatch.setattr(saving, "write_file", lambda *given: may_write.wait(100) and write_file(*given))

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

    for saved, loaded in on_ranks(2, body):
        assert_same(loaded, saved)


def test_keep_last_and_latest_checkpoint(tmp_path: Path) -> None:
    """Newest by their order, not by name; what is not ours is left alone, and so is what is saved elsewhere."""
    (tmp_path / "run" / "mine").mkdir(parents=True)
    (tmp_path / "run" / "mine" / "data.txt").write_text("precious")
    (tmp_path / "run" / "cut off" / "data-0123456789abcdef").mkdir(parents=True)

    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        assert zero3.latest_checkpoint(tmp_path / "run") is None
        for name in ("z", "y", "b", "a", "y"):
            zero3.save_checkpoint(tmp_path / "run" / name, model, optimizer, keep_last=2)
            assert zero3.latest_checkpoint(tmp_path / "run") == tmp_path / "run" / name
            here = [path.name for path in (tmp_path / "run").iterdir() if (path / "manifest.json").exists()]
            assert len(here) <= 2, f"rank {group.rank} returned before {here} were pruned"
        zero3.save_checkpoint(tmp_path / "other", model)
        with pytest.raises(ValueError, match="keep_last must be at least 1, found 0"):
            zero3.save_checkpoint(tmp_path / "run" / "c", model, keep_last=0)

    on_ranks(2, body)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["a", "mine", "y"]
    assert (tmp_path / "run" / "mine" / "data.txt").read_text() == "precious"


class Keeps(torch.optim.SGD):
    """A state under the key that it is told."""

    def __init__(self, params: Any, key: object) -> None:
        super().__init__(params, lr=0.1)
        self.key = key

    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter][self.key] = torch.zeros_like(parameter)


@pytest.mark.parametrize("key", ["a:b", 3])
def test_a_state_that_no_name_can_stand_for_is_refused(key: object, tmp_path: Path) -> None:
    model = zero3.Zero3Sequential([zero3.Zero3Layer(nn.Linear(2, 2))])
    optimizer = Keeps(model.get_trainable_chunk(), key)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(TypeError, match=f"{key!r} of 0.*must be a string without a colon"):
        zero3.save_checkpoint(tmp_path / "a", model, optimizer)
    assert not (tmp_path / "a" / "manifest.json").exists()


def test_a_checkpoint_that_is_deleted_is_none_from_the_first_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads while it goes, or after a deletion that was cut off, must not take it for whole."""
    zero3.save_checkpoint(tmp_path / "a", nn.Sequential(zero3.Zero3Layer(nn.Linear(2, 2))))
    there: list[bool] = []
    remove = file_operations.remove
    monkeypatch.setattr(file_operations, "remove", lambda path: (there.append((tmp_path / "a/manifest.json").exists()), remove(path)))
    manifest.delete(tmp_path / "a")
    assert there and not any(there) and not (tmp_path / "a").exists()


@pytest.mark.parametrize(("keep_last", "kind"), [(1.5, TypeError), (True, TypeError), ("2", TypeError), (0, ValueError), (-1, ValueError)])
@pytest.mark.parametrize("rank", [0, 1])
def test_keep_last_is_refused_before_anything_is_written(keep_last: Any, kind: type[Exception], rank: int, tmp_path: Path) -> None:
    """On every rank, whichever has it."""

    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        zero3.save_checkpoint(tmp_path / "first", model, optimizer)
        with pytest.raises(kind, match=rf"rank {rank}: keep_last must be .*, found {keep_last!r}"):
            zero3.save_checkpoint(tmp_path / "second", model, optimizer, keep_last=keep_last if group.rank == rank else 1)
        with pytest.raises(ValueError, match=r"rank 0: keep_last: 1; rank 1: keep_last: 2"):
            zero3.save_checkpoint(tmp_path / "second", model, optimizer, keep_last=1 + group.rank)

    on_ranks(2, body)
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_save_checkpoint_leaves_other_files_in_the_directory_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    on_ranks(2, partial(save, tmp_path))
    on_ranks(2, partial(save, tmp_path))
    assert sorted(path.name.partition("-")[0] for path in tmp_path.iterdir()) == ["data", "manifest.json", "notes.txt"]


def test_save_checkpoint_and_load_checkpoint_mistakes_are_everybodys(tmp_path: Path) -> None:
    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        with pytest.raises(ValueError, match=r"s3://bucket/run: fsspec paths are not supported"):
            zero3.save_checkpoint("s3://bucket/run", model)
        with pytest.raises(ValueError, match=r"ranks differ in save_checkpoint: rank 0: path: .*zero; rank 1: path: .*one"):
            zero3.save_checkpoint(tmp_path / ("one" if group.rank else "zero"), model)
        with zero3.full_params(model), pytest.raises(RuntimeError, match=r"save_checkpoint inside full_params"):
            zero3.save_checkpoint(tmp_path, model)
        zero3.save_checkpoint(tmp_path, model)
        with pytest.raises(ValueError, match=r"was saved without an optimizer: load it without one"):
            zero3.load_checkpoint(tmp_path, model, optimizer)
        with zero3.full_params(model), pytest.raises(RuntimeError, match=r"load_checkpoint inside full_params"):
            zero3.load_checkpoint(tmp_path, model)

    on_ranks(2, body)


def test_load_checkpoint_refuses_another_model_by_all_names_at_once(tmp_path: Path) -> None:
    on_ranks(2, partial(save, tmp_path))

    def other() -> nn.Module:
        model = odd()
        model.blocks[0].more = nn.Parameter(torch.zeros(2))
        model.blocks[1].idle = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        model.norm.float()
        del model.blocks[2].gain
        model.blocks[2].gain = 1.0
        return model

    message = (
        r"missing: blocks\.0\.more\. unknown: blocks\.2\.gain\. other shapes: blocks\.1\.idle has \(3,\), expected \(4,\)\. "
        r"other dtypes: norm\.weight has float64, expected float32; norm\.bias"
    )

    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        before = zero3.full_state_dict(model, rank0_only=False)
        with pytest.raises(ValueError, match=message):
            zero3.load_checkpoint(tmp_path, model, optimizer)
        assert_same(zero3.full_state_dict(model, rank0_only=False), before)

    on_ranks(3, body, build=other)


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


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's account of a process's memory")
def test_load_checkpoint_takes_memory_for_the_new_state_and_one_buffer(tmp_path: Path) -> None:
    for grown, loading, state in on_processes(2, saved_memory, str(tmp_path), fresh=True):
        assert state > 30 * 2**20
        assert grown < 4 * 2**20, grown / 2**20
        assert loading < state + BLOCK_BYTES + 4 * 2**20, (loading / 2**20, state / 2**20)


def test_load_checkpoint_into_an_optimizer_that_holds_frozen_chunks_too(tmp_path: Path) -> None:
    """Of those nothing was saved, and nothing is needed."""

    def body(group: ThreadCommunicator) -> None:
        layer = zero3.Zero3Layer(modules[group.rank], process_group=group)
        saving_one = torch.optim.SGD(layer.get_trainable_chunk(), lr=0.5, momentum=0.9)
        layer(torch.ones(1, 2)).sum().backward()
        saving_one.step()
        zero3.save_checkpoint(tmp_path / "a", layer, saving_one)
        loading_one = torch.optim.SGD(list(layer.parameters()), lr=0.1, momentum=0.9)
        zero3.load_checkpoint(tmp_path / "a", layer, loading_one)
        assert loading_one.param_groups[0]["lr"] == 0.5 and len(loading_one.state) == 1

    modules = [nn.Linear(2, 2) for _ in range(2)]
    for module in modules:
        module.bias.requires_grad_(False)
    run_ranks(2, body)


def test_what_a_checkpoint_leaves_out_stays_unloaded(tmp_path: Path) -> None:
    """Memory that nothing was written into must not be computed with."""

    def body(group: ThreadCommunicator) -> None:
        saved, empty = (zero3.Zero3Layer(module, process_group=group) for module in models[group.rank])
        zero3.save_checkpoint(tmp_path / "a", saved, frozen=False)
        zero3.load_checkpoint(tmp_path / "a", empty)
        with pytest.raises(RuntimeError, match="bias"):
            empty(torch.ones(1, 2))

    models = [(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")) for _ in range(2)]
    for pair in models:
        for module in pair:
            module.bias.requires_grad_(False)
    run_ranks(2, body)
