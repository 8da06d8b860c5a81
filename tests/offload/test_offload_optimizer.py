"""`offload_optimizer`: the same bits, stepped chunk by chunk, with the state in files beside the chunks."""

from __future__ import annotations

import copy
import errno
import gc
import inspect
import mmap
import os
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.scratch.test_mapped_files import of_pages
from tests.support.models import WIDTH, WORLDS, linear, mlp, seeded, step
from tests.support.processes import Rank, on_ranks
from tests.support.ranks import ThreadCommunicator, ThreadMesh, run_mesh, run_ranks
from tests.support.reference import Turn, check_parity, in_sequence, process_group
from zero3.offload.one_by_one import try_out
from zero3.offload.state_files import Visit
from zero3.scratch.mapped_files import MappedFiles

Make = Callable[[Any], torch.optim.Optimizer]

MAKES: dict[str, Make] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "adamw foreach amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True, amsgrad=True),
    "sgd momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),  # makes its state at once
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
    "asgd": lambda parameters: torch.optim.ASGD(parameters, lr=0.1),
}


def odd() -> nn.Sequential:
    """Layers of unequal sizes, one of them smaller than most numbers of ranks, one frozen."""
    model = seeded(linear, lambda: nn.Sequential(linear(), nn.Tanh(), linear()), lambda: nn.LayerNorm(WIDTH), linear, linear)
    model[3].requires_grad_(False)
    return model


def wrapped(group: ThreadCommunicator, place: object, model: nn.Module | None = None, **policy: Any) -> zero3.Zero3Sequential:
    policy["offload"] = place
    return in_sequence(odd() if model is None else model, process_group(group), zero3.ShardingPolicy(**policy))  # type: ignore[return-value]


def groups_of(model: nn.Module, how: str) -> Any:
    if how == "chunks":
        return zero3.get_trainable_chunk(model)
    whole = {"whole": True} if how == "whole" else {}
    return zero3.param_groups(model, lambda name, info: {"weight_decay": 0.1 if info.ndim > 1 else 0.0, **whole})


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, group: ThreadCommunicator, micro_batches: int = 1, clip: bool = True
) -> None:
    for number in range(3):
        for micro in range(micro_batches):
            with zero3.no_sync(model) if micro < micro_batches - 1 else torch.enable_grad():
                step(model, Turn(group.rank, 10 * number + micro, group.world_size))
        if clip:
            zero3.clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()


def values_of(model: nn.Module) -> list[Tensor]:
    return [chunk.detach().clone() for chunk in model.parameters()]


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    found = (value for group in optimizer.param_groups for p in group["params"] for value in optimizer.state.get(p, {}).values())
    return [value for value in found if isinstance(value, Tensor) and value.ndim and value.numel()]


def in_files(values: list[Tensor]) -> bool:
    """Whether the memory of all of them is that of files without a name, shared with them."""
    rows = (row.split() for row in Path("/proc/self/maps").read_text().splitlines() if row.endswith("(deleted)"))
    spans = [[int(each, 16) for each in row[0].split("-")] for row in rows if row[1] == "rw-s"]
    return bool(values) and all(any(start <= value.data_ptr() < stop for start, stop in spans) for value in values)


def same(mine: Iterable[Tensor], theirs: Iterable[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("how", ["chunks", "groups", "whole"])
@pytest.mark.parametrize("name", MAKES)
@WORLDS
def test_same_bits_as_without(world_size: int, name: str, how: str, tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> None:
        found = {}
        for place in (None, tmp_path):
            model = wrapped(group, place)
            optimizer = MAKES[name](groups_of(model, how))
            assert zero3.offload_optimizer(optimizer) is optimizer
            trained(model, optimizer, group)
            found[place] = [*values_of(model), *state_of(optimizer)]
            assert place is None or not state_of(optimizer) or in_files(state_of(optimizer))
        assert same(found[tmp_path], found[None])

    run_ranks(world_size, body)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("how", ["chunks", "groups"])
@pytest.mark.parametrize("place", ["cpu", "files"])
@WORLDS
def test_in_backward_same_bits(world_size: int, place: str, how: str, accumulation: int, tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> None:
        found = []
        for rest in (None, "cpu" if place == "cpu" else tmp_path):
            model = wrapped(group, rest)
            optimizer = zero3.offload_optimizer(MAKES["adamw"](groups_of(model, how)), in_backward=True)
            trained(model, optimizer, group, accumulation, clip=False)
            found.append([*values_of(model), *state_of(optimizer)])
        assert same(*found)

    run_ranks(world_size, body)


@pytest.mark.parametrize(
    "policy",
    [
        {"stage": 1}, {"stage": 2}, {"transactional": True}, {"dynamic": True}, {"prefetch_depth": 0}, {"prefetch_depth": 2},
        {"reshard_after_forward": False}, {"param_dtype": torch.float32, "reduce_dtype": torch.float64}, {"grad_dtype": torch.float64},
        {"gradient_reduction": "sum"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("in_backward", [False, True])
def test_every_policy(in_backward: bool, policy: dict[str, Any], tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> None:
        found = []
        if in_backward and policy == {"stage": 1}:
            model = wrapped(group, tmp_path, mlp(), **policy)
            optimizer = MAKES["adamw"](zero3.get_trainable_chunk(model))
            with pytest.raises(ValueError, match="in_backward=True with stage=1"):
                zero3.offload_optimizer(optimizer, in_backward=True)
            return
        for rest in (None, tmp_path):
            model = wrapped(group, rest, mlp(), **policy)
            optimizer = zero3.offload_optimizer(MAKES["adamw"](zero3.get_trainable_chunk(model)), in_backward=in_backward)
            trained(model, optimizer, group, clip=not in_backward)
            found.append([*values_of(model), *state_of(optimizer)])
        assert same(*found)

    run_ranks(2, body)


@pytest.mark.parametrize("in_backward", [False, True])
def test_on_a_mesh(in_backward: bool, tmp_path: Path) -> None:
    def body(mesh: ThreadMesh) -> None:
        found = []
        for rest in (None, tmp_path):
            model = in_sequence(odd(), mesh, zero3.ShardingPolicy(offload=rest))
            optimizer = zero3.offload_optimizer(MAKES["adamw"](zero3.get_trainable_chunk(model)), in_backward=in_backward)
            for number in range(3):
                with zero3.no_sync(model, replicas_only=True):
                    step(model, Turn(mesh.rank, 2 * number, 4))
                step(model, Turn(mesh.rank, 2 * number + 1, 4))
                optimizer.step()
                optimizer.zero_grad()
            found.append([*values_of(model), *state_of(optimizer)])
        assert same(*found)

    run_mesh(2, 2, body)


@pytest.mark.parametrize("in_backward", [False, True])
def test_step_guard_takes_a_failed_micro_batch_back(in_backward: bool, tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> None:
        found = []
        for rest in (None, tmp_path):
            model = wrapped(group, rest, mlp(), transactional=True)
            optimizer = zero3.offload_optimizer(MAKES["adamw"](zero3.get_trainable_chunk(model)), in_backward=in_backward)
            for number in range(3):
                with zero3.step_guard(model) as guarded:
                    step(model, Turn(group.rank, number, group.world_size))
                    if number == 1 and group.rank == 0:
                        raise ArithmeticError("as told")
                if not guarded.failed:
                    optimizer.step()
                optimizer.zero_grad()
            found.append([*values_of(model), *state_of(optimizer)])
        assert same(*found)

    run_ranks(2, body)


@pytest.mark.parametrize("in_backward", [False, True])
@WORLDS
def test_as_an_unsharded_model_trains(world_size: int, in_backward: bool, tmp_path: Path) -> None:
    """Plain torch's own AdamW is the judge. (With `in_backward` gradients are gone when the judge would look.)"""
    model, losses = mlp(), []
    plain = torch.optim.AdamW(model.parameters(), lr=0.1)
    for number in range(3):
        plain.zero_grad()
        losses.append(sum(step(model, Turn(rank, number, world_size)).item() for rank in range(world_size)))
        for parameter in model.parameters():
            parameter.grad /= world_size
        plain.step()

    def body(group: ThreadCommunicator) -> list[float]:
        sharded = wrapped(group, tmp_path, mlp())
        optimizer = zero3.offload_optimizer(torch.optim.AdamW(zero3.get_trainable_chunk(sharded), lr=0.1), in_backward=in_backward)
        found = []
        for number in range(3):
            optimizer.zero_grad()
            found.append(step(sharded, Turn(group.rank, number, group.world_size)).item())
            optimizer.step()
        with zero3.full_params(sharded):
            for mine, theirs in zip(sharded.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
        return found

    summed = [sum(each) for each in zip(*run_ranks(world_size, body), strict=True)]
    assert summed == pytest.approx(losses, rel=1e-12)


def test_parity_of_gradients_and_parameters(tmp_path: Path) -> None:
    make: Any = lambda parameters: zero3.offload_optimizer(torch.optim.AdamW(parameters, lr=0.1))  # noqa: E731
    check_parity(mlp, step, policy=zero3.ShardingPolicy(offload=tmp_path), optimizer=make, tolerance=1e-10, same_bits_on_one_rank=False)


@pytest.mark.parametrize("place", [None, "cpu"])
def test_without_files_nothing_changes(place: str | None) -> None:
    model = zero3.Zero3Layer(linear(), policy=zero3.ShardingPolicy(offload=place))
    optimizer = torch.optim.AdamW(model.parameters())
    assert zero3.offload_optimizer(optimizer) is optimizer
    assert "step" not in vars(optimizer)
    plain = torch.optim.SGD(nn.Linear(2, 2).parameters())
    assert zero3.offload_optimizer(plain, in_backward=True) is plain
    assert "step" not in vars(plain)


def small(place: Path, width: int = 100, depth: int = 4, **policy: Any) -> zero3.Zero3Sequential:
    layers = seeded(*[lambda: nn.Linear(width, width)] * depth)
    return zero3.Zero3Sequential([zero3.Zero3Layer(layer, policy=zero3.ShardingPolicy(offload=place, **policy)) for layer in layers])


def backward(model: nn.Module, width: int = 100) -> None:
    model(torch.ones(2, width, dtype=torch.float64)).pow(2).sum().backward()


def test_bytes_moved_and_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step reads chunks, gradients and state once, and lets go of each once. The next chunk's numbers come while one is stepped."""
    log: list[tuple[str, int]] = []
    ways, advise, rest_all = {mmap.MADV_DONTNEED: "rest", 22: "read", 23: "write"}, MappedFiles._advise, MappedFiles.rest_all

    def advised(files: MappedFiles, tensor: Tensor, advice: int) -> int:
        if tensor in files:
            log.append((ways.get(advice, "told"), tensor.data_ptr()))
        return advise(files, tensor, advice)

    def rested(files: MappedFiles) -> None:
        log.extend(("rest", address) for address, *_ in files._places)
        rest_all(files)

    monkeypatch.setattr(MappedFiles, "_advise", advised)
    monkeypatch.setattr(MappedFiles, "rest_all", rested)
    model = small(tmp_path)
    chunks = zero3.get_trainable_chunk(model)
    optimizer = zero3.offload_optimizer(torch.optim.AdamW(chunks))
    backward(model)
    optimizer.step()  # makes the state
    optimizer.zero_grad()
    wait_for(optimizer)
    backward(model)
    written = {t.data_ptr(): n for n, chunk in enumerate(chunks) for t in (chunk, *state_of_one(optimizer, chunk))}
    read = {chunk.grad.data_ptr(): n for n, chunk in enumerate(chunks) if chunk.grad is not None}
    log.clear()
    optimizer.step()
    wait_for(optimizer)
    counts = Counter(log)
    assert set(counts.values()) == {1}
    expected = [("write", place) for place in written] + [("read", place) for place in read] + [("rest", at) for at in [*written, *read]]
    assert counts.keys() == set(expected) and len(expected) == 4 * (3 + 1) * 2
    firsts = list(dict.fromkeys((what, (written | read)[place]) for what, place in log))
    assert firsts.index(("write", 1)) < firsts.index(("rest", 0))  # ahead
    assert firsts.index(("rest", 0)) < firsts.index(("write", 2))  # but by one chunk alone


def state_of_one(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> list[Tensor]:
    return [value for value in optimizer.state[parameter].values() if value.ndim]


def wait_for(optimizer: Any) -> None:
    """Until the threads have nothing more to do."""
    traffic = inspect.getclosurevars(optimizer.step.__func__.__wrapped__).nonlocals["turns"].traffic
    traffic.end_step().result()
    for future in traffic._writing:
        future.result()


@pytest.mark.parametrize("in_backward", [False, True])
def test_state_is_in_files_and_leaves_the_process(in_backward: bool, tmp_path: Path) -> None:
    model = small(tmp_path)
    optimizer = zero3.offload_optimizer(torch.optim.AdamW(zero3.get_trainable_chunk(model)), in_backward=in_backward)
    for _ in range(2):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    wait_for(optimizer)
    for value in [*state_of(optimizer), *zero3.get_trainable_chunk(model)]:
        assert of_pages(value, "Rss") == of_pages(value, "Anonymous") == 0


@pytest.mark.parametrize("in_backward", [False, True])
@WORLDS
def test_where_memory_is_short_each_number_is_written_once_a_step(
    world_size: int, in_backward: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as it has changed. A gradient that is used at once goes nowhere."""
    written, early, put_by = Counter[int](), Counter[int](), Counter[int]()  # by address; by thread, so by rank
    write, put = MappedFiles.write, MappedFiles.put

    def wrote(files: MappedFiles, tensor: Tensor, *, wait: bool) -> None:
        if tensor in files:
            written[tensor.data_ptr()] += wait
            early[threading.get_ident()] += not wait
        write(files, tensor, wait=wait)

    def kept(files: MappedFiles, tensor: Tensor, what: str) -> Tensor | None:
        put_by[threading.get_ident()] += tensor.numel() > 0
        return put(files, tensor, what)

    monkeypatch.setattr(MappedFiles, "is_away", lambda files, tensor: tensor in files)
    monkeypatch.setattr(MappedFiles, "write", wrote)
    monkeypatch.setattr(MappedFiles, "put", kept)

    def body(group: ThreadCommunicator) -> None:
        found, own, steps = [], threading.get_ident(), 3
        for place in (None, tmp_path):
            model = wrapped(group, place)
            optimizer = zero3.offload_optimizer(MAKES["adamw"](zero3.get_trainable_chunk(model)), in_backward=in_backward)
            for number in range(steps):
                step(model, Turn(group.rank, number, group.world_size))
                optimizer.step()
                optimizer.zero_grad()
                if place is not None:
                    wait_for(optimizer)
            found.append([*values_of(model), *state_of(optimizer)])
        assert same(*found)
        chunks = [chunk for chunk in zero3.get_trainable_chunk(model) if chunk.numel()]
        assert [written[value.data_ptr()] for value in [*chunks, *state_of(optimizer)]] == [steps] * 3 * len(chunks)
        assert put_by[own] == (0 if in_backward else steps * len(chunks))
        assert early[own] == (0 if in_backward else (steps - 1) * len(chunks))  # the first ones were not known to be dropped

    run_ranks(world_size, body)


@pytest.mark.parametrize("late", ["bring", "let_go", "write"])
def test_a_late_thread_holds_no_gradients(late: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the next ones use the same files again, and the disk needs no more than what was reserved."""
    on_time, held = getattr(Visit, late), list[Visit]()
    monkeypatch.setattr(MappedFiles, "is_away", lambda files, tensor: tensor in files)
    monkeypatch.setattr(Visit, late, lambda visit: on_time(visit) if held.append(visit) is None else None)
    model = small(tmp_path)
    optimizer = zero3.offload_optimizer(torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1))
    before = disk_of(tmp_path)
    for _ in range(3):
        backward(model)
        zero3.clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        wait_for(optimizer)
    assert held and disk_of(tmp_path) == before > 0


def disk_of(place: Path) -> int:
    """The bytes of this process's files without a name in a directory."""
    open_files = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    ours = [file for file in open_files if file.is_symlink() and os.readlink(file).startswith(f"{place}/")]
    return sum(file.stat().st_blocks * 512 for file in ours)


def test_first_step_makes_zeros_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """State is never in memory, not even when it is made."""
    model = small(tmp_path, depth=1)
    optimizer = zero3.offload_optimizer(torch.optim.AdamW(zero3.get_trainable_chunk(model)))
    copies: list[Tensor] = []
    monkeypatch.setattr(Tensor, "copy_", lambda self, *given, copy=Tensor.copy_: copies.append(self) or copy(self, *given))
    backward(model)
    before = len(copies)
    optimizer.step()
    assert len(copies) == before and len(state_of(optimizer)) == 2


@pytest.mark.parametrize("loads", ["load_checkpoint", "load_full_optimizer_state_dict", "load_state_dict"])
@pytest.mark.parametrize("resets", [False, True])
@WORLDS
def test_in_backward_goes_on_from_a_checkpoint_after_a_backward_that_raised(
    world_size: int, resets: bool, loads: str, tmp_path: Path
) -> None:
    """Also what had not landed when it raised steps nothing any more."""

    def fail(_: Tensor) -> None:
        raise ArithmeticError("as told")

    def body(group: ThreadCommunicator) -> None:
        found, saved = [], list[Tensor]()
        for place in (None, tmp_path):
            model = wrapped(group, place, seeded(*[linear] * 4), prefetch_depth=2)
            optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1, momentum=0.9)
            zero3.offload_optimizer(optimizer, in_backward=place is not None)
            step(model, Turn(group.rank, 0, world_size))
            optimizer.step()
            optimizer.zero_grad()
            zero3.save_checkpoint(tmp_path / "saved", model, optimizer)
            saved = values_of(model)
            states = copy.deepcopy(optimizer.state_dict()), zero3.full_optimizer_state_dict(model, optimizer)
            hook = model[0].register_forward_hook(lambda module, given, output: output.register_hook(fail) and None)
            with pytest.raises(ArithmeticError):
                step(model, Turn(group.rank, 1, world_size))
            hook.remove()
            if place is not None:
                assert not same(values_of(model), saved)  # some chunks were stepped
            if resets:
                zero3.reset(model)
            zero3.load_checkpoint(tmp_path / "saved", model, optimizer if loads == "load_checkpoint" else None)
            if loads == "load_state_dict":
                optimizer.load_state_dict(states[0])
            elif loads == "load_full_optimizer_state_dict":
                zero3.load_full_optimizer_state_dict(model, optimizer, states[1])
            with torch.no_grad():
                model(Turn(group.rank, 2, world_size).tensor(3, WIDTH))
            assert same(values_of(model), saved)
            optimizer.zero_grad()
            step(model, Turn(group.rank, 2, world_size))
            optimizer.step()
            found.append([*values_of(model), *state_of(optimizer)])
        assert same(*found)

    run_ranks(world_size, body)


def test_gradients_are_few_in_backward(tmp_path: Path) -> None:
    """Each is gone before the next layer's lands."""
    model = small(tmp_path)
    chunks = zero3.get_trainable_chunk(model)
    optimizer = zero3.offload_optimizer(torch.optim.SGD(chunks, lr=0.1), in_backward=True)
    before, counts = values_of(model), []
    for chunk in chunks:
        chunk.register_post_accumulate_grad_hook(lambda _: counts.append(sum(type(c.grad) is Tensor for c in chunks)))
    backward(model)
    assert counts and max(counts) == 0  # ours was first
    assert not any(torch.equal(mine, theirs) for mine, theirs in zip(values_of(model), before, strict=True))
    stepped = values_of(model)
    optimizer.step()
    assert same(values_of(model), stepped)
    assert all(chunk.grad is None for chunk in chunks)


@WORLDS
def test_in_backward_refuses_what_reads_gradients(world_size: int, tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = wrapped(group, tmp_path, mlp())
        optimizer = zero3.offload_optimizer(torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1), in_backward=True)
        step(model, Turn(group.rank, 0, group.world_size))
        scalers = [kind("cpu") for kind in (zero3.GradScaler, torch.amp.GradScaler)]
        for scaler in scalers:
            scaler.scale(torch.ones(()))
        for read in (
            lambda: zero3.clip_grad_norm_(model, 1.0),
            lambda: zero3.parameter_norms(model),
            *(partial(scaler.unscale_, optimizer) for scaler in scalers),
            lambda: [chunk.grad + 1 for chunk in zero3.get_trainable_chunk(model)],
        ):
            with pytest.raises(RuntimeError, match=r"used up.*in_backward=True"):
                read()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        step(model, Turn(group.rank, 1, group.world_size))
        with pytest.raises(RuntimeError, match=r"layer .* got a second gradient before optimizer\.step"):
            step(model, Turn(group.rank, 2, group.world_size))

    run_ranks(world_size, body)


def test_scheduler_closure_and_hooks(tmp_path: Path) -> None:
    """As torch has them: a hook is called once a step, and so is a closure."""
    found = []
    for place in (None, tmp_path):
        model, calls = small(place), []
        optimizer = zero3.offload_optimizer(torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1))
        optimizer.register_step_pre_hook(lambda *given, calls=calls: calls.append("before"))
        optimizer.register_step_post_hook(lambda *given, calls=calls: calls.append("after"))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1 / (number + 1))
        for _ in range(3):

            def closure(model: nn.Module = model, optimizer: Any = optimizer, calls: list[str] = calls) -> float:
                calls.append("closure")
                optimizer.zero_grad()
                backward(model)
                return 7.0

            assert optimizer.step(closure) == 7.0
            schedule.step()
        found.append([*values_of(model), torch.tensor([group["lr"] for group in optimizer.param_groups])])
        assert calls == ["before", "closure", "after"] * 3
    assert same(*found)


@pytest.mark.parametrize("fused", [False, True])
@WORLDS
def test_grad_scaler(world_size: int, fused: bool, tmp_path: Path) -> None:
    """One step is skipped by all ranks, as without offload: its loss is infinite on rank 0."""

    def body(group: ThreadCommunicator) -> None:
        found = []
        for place in (None, tmp_path):
            model = wrapped(group, place, mlp())
            optimizer = zero3.offload_optimizer(torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1, fused=fused))
            scaler = zero3.GradScaler("cpu", init_scale=4.0)
            for number in range(3):
                optimizer.zero_grad()
                loss = model(Turn(group.rank, number, group.world_size).tensor(3, WIDTH)).pow(2).mean()
                scaler.scale(loss * (float("inf") if number == 1 and group.rank == 0 else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
            found.append([*values_of(model), torch.tensor(scaler.get_scale())])
        assert same(*found)

    run_ranks(world_size, body)


def test_state_dict_and_load_state_dict(tmp_path: Path) -> None:
    """A state that was saved without offload is loaded with it, and the other way round; what is loaded is in files again."""
    runs = {}
    for place in (None, tmp_path):
        model = small(place)
        optimizer = zero3.offload_optimizer(torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1))
        backward(model)
        optimizer.step()
        runs[place] = model, optimizer, [value.clone() for value in state_of(optimizer)]
    saved = {place: optimizer.state_dict() for place, (_, optimizer, _) in runs.items()}
    assert str(saved[None]) == str(saved[tmp_path])
    for place, other in ((None, tmp_path), (tmp_path, None)):
        model, optimizer, before = runs[place]
        optimizer.load_state_dict(saved[other])
        assert same(state_of(optimizer), before)
        if place is not None:
            assert in_files(state_of(optimizer))
        optimizer.step()
    assert same(values_of(runs[None][0]), values_of(runs[tmp_path][0]))


@pytest.mark.parametrize("in_backward", [False, True])
def test_checkpoint_goes_on_with_more_ranks(in_backward: bool, tmp_path: Path) -> None:
    def first(group: ThreadCommunicator) -> None:
        model = wrapped(group, tmp_path, mlp())
        optimizer = zero3.offload_optimizer(torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1), in_backward=in_backward)
        trained(model, optimizer, group, clip=False)
        zero3.save_checkpoint(tmp_path / "saved", model, optimizer)

    def second(group: ThreadCommunicator) -> list[Tensor]:
        found = []
        for place in (None, tmp_path):
            model = wrapped(group, place, mlp())
            optimizer = zero3.offload_optimizer(torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1), in_backward=in_backward)
            zero3.load_checkpoint(tmp_path / "saved", model, optimizer)
            assert place is None or in_files(state_of(optimizer))
            trained(model, optimizer, group, clip=False)
            found.append([*values_of(model), *state_of(optimizer)])
        assert in_files(state_of(optimizer))
        assert same(*found)
        return found

    run_ranks(2, first)
    run_ranks(3, second)


class SharedCount(torch.optim.SGD):
    """Its step size depends on how often `step` was called."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] *= 0.5
        return super().step(closure)


class OverAll(torch.optim.Optimizer):
    """Takes the largest gradient of all parameters for its unit."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        unit = max(p.grad.abs().max() for p in parameters)
        for parameter in parameters:
            parameter.sub_(0.1 * parameter.grad / unit)


class Unmakeable(torch.optim.SGD):
    def __init__(self, parameters: Any, secret: object) -> None:
        super().__init__(parameters, lr=0.1)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (torch.optim.LBFGS, "LBFGS can't be tried out.*closure"),
        (lambda parameters: SharedCount(parameters, lr=0.1), "SharedCount computes something from all parameters at once"),
        (OverAll, "OverAll computes something from all parameters at once"),
        (lambda parameters: Unmakeable(parameters, object()), "Unmakeable can't be tried out"),
    ],
)
def test_refuses_what_can_not_go_chunk_by_chunk(make: Make, says: str, tmp_path: Path) -> None:
    model = small(tmp_path)
    optimizer = make(zero3.get_trainable_chunk(model))
    with pytest.raises(ValueError, match=says):
        zero3.offload_optimizer(optimizer)
    assert "step" not in vars(optimizer)
    backward(model)
    if not isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step()  # it works without


def test_refuses_what_is_no_optimizer_and_a_scheduler_before(tmp_path: Path) -> None:
    model = small(tmp_path)
    with pytest.raises(TypeError, match="found a list"):
        zero3.offload_optimizer([])  # type: ignore[type-var]
    optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    with pytest.raises(ValueError, match="make the scheduler with what it returns"):
        zero3.offload_optimizer(optimizer)


def test_twice_is_once_and_a_deleted_optimizer_is_gone(tmp_path: Path) -> None:
    model = small(tmp_path)
    optimizer = zero3.offload_optimizer(torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1), in_backward=True)
    stands = vars(optimizer)["step"]
    assert zero3.offload_optimizer(optimizer) is optimizer and vars(optimizer)["step"] is stands
    reference = weakref.ref(optimizer)
    gc.collect()
    gc.disable()
    try:
        del optimizer, stands
        assert reference() is None
    finally:
        gc.enable()
    backward(model)  # hooks of what is gone do nothing
    assert all(type(chunk.grad) is Tensor for chunk in zero3.get_trainable_chunk(model))


def test_set_trainable_and_param_groups_afterwards_raise(tmp_path: Path) -> None:
    model = small(tmp_path)
    optimizer = zero3.offload_optimizer(torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1))
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    zero3.param_groups(model, lambda name, info: {"weight_decay": float(info.ndim > 1)})
    backward(model)
    with pytest.raises(RuntimeError, match="param_groups"):
        optimizer.step()
    assert all(group["params"] for group in optimizer.param_groups)


@WORLDS
def test_a_full_disk_is_one_error_on_all_ranks(world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate, unlucky = os.posix_fallocate, set[int]()

    def refuse(*given: int) -> None:
        _full() if threading.get_ident() in unlucky else allocate(*given)

    monkeypatch.setattr(os, "posix_fallocate", refuse)

    def body(group: ThreadCommunicator) -> str:
        model = wrapped(group, tmp_path, mlp())
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1)
        before = values_of(model)
        if group.rank == world_size - 1:
            unlucky.add(threading.get_ident())
        with pytest.raises(OSError, match=f"rank {world_size - 1}.*no room" if world_size > 1 else "no room") as caught:
            zero3.offload_optimizer(optimizer)
        assert "step" not in vars(optimizer) and same(values_of(model), before)
        return str(caught.value)

    assert len(set(run_ranks(world_size, body))) == 1


def test_state_that_finds_no_room_later_stays_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """amsgrad, turned on after the trial, keeps one tensor more."""
    found = []
    for place in (None, tmp_path):
        model = small(place, depth=2)
        optimizer = zero3.offload_optimizer(torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1))
        optimizer.param_groups[0]["amsgrad"] = True
        backward(model)
        with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            patch.setattr(os, "posix_fallocate", _full)
            optimizer.step()
        assert [str(each.message).startswith("state of the optimizer stays in memory") for each in told] == [True] * (place is not None)
        found.append([*values_of(model), *state_of(optimizer)])
    assert same(*found)


def _full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def on_gloo(rank: Rank, in_backward: bool) -> tuple[bool, list[float]]:
    """AdamW on real processes, with files and without: whether all bits are the same, and the losses."""
    found, losses = [], []
    for place in (None, rank.scratch):
        model = in_sequence(odd(), None, zero3.ShardingPolicy(offload=place))
        optimizer = zero3.offload_optimizer(torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1), in_backward=in_backward)
        losses = []
        for number in range(4):
            losses.append(step(model, Turn(rank.number, number, rank.world_size)).item())
            if not in_backward:
                zero3.clip_grad_norm_(model, 0.1)
            optimizer.step()
            optimizer.zero_grad()
        found.append([*values_of(model), *state_of(optimizer), torch.tensor(losses)])
    assert in_files(state_of(optimizer))
    return same(*found), losses


@pytest.mark.parametrize("in_backward", [False, True])
def test_on_processes(in_backward: bool) -> None:
    assert all(equal for equal, _ in on_ranks(2, on_gloo, in_backward))


def test_a_relative_directory_is_that_of_the_policys_making(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    policy = zero3.ShardingPolicy(offload="here")
    monkeypatch.chdir("/")
    assert policy.offload == str(tmp_path / "here")
    assert zero3.ShardingPolicy(offload="cpu").offload == "cpu"


def test_add_param_group_of_a_model_in_another_directory(tmp_path: Path) -> None:
    def trained(*places: Path | None) -> list[Tensor]:
        def body(group: ThreadCommunicator) -> list[Tensor]:
            models = [wrapped(group, place) for place in places]
            optimizer = zero3.offload_optimizer(torch.optim.SGD(zero3.get_trainable_chunk(models[0]), lr=0.1, momentum=0.9))
            optimizer.add_param_group({"params": zero3.get_trainable_chunk(models[1])})
            for number in range(2):
                for model in models:
                    model(Turn(0, number, 1).tensor(2, WIDTH)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return [chunk.detach().clone() for model in models for chunk in zero3.get_trainable_chunk(model)]

        return run_ranks(1, body)[0]  # type: ignore[no-any-return]

    places = tmp_path / "one", tmp_path / "other"
    for place in places:
        place.mkdir()
    for found, expected in zip(trained(*places), trained(None, None), strict=True):
        assert torch.equal(found, expected)


def test_a_gradient_that_finds_no_room_on_one_rank_stays_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller still holds the gradients of the step before, so new ones need new files."""
    allocate, unlucky = os.posix_fallocate, set[int]()
    monkeypatch.setattr(os, "posix_fallocate", lambda *given: _full() if threading.get_ident() in unlucky else allocate(*given))

    def trained(place: Path | None) -> list[list[Tensor]]:
        def body(group: ThreadCommunicator) -> list[Tensor]:
            model = wrapped(group, place, mlp())
            optimizer = zero3.offload_optimizer(torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1))
            held = []
            for number in range(3):
                step(model, Turn(group.rank, number, group.world_size))
                optimizer.step()
                held += [chunk.grad for chunk in zero3.get_trainable_chunk(model)]
                optimizer.zero_grad()
                if group.rank == 1:
                    unlucky.add(threading.get_ident())
            return [*values_of(model), *(gradient.clone() for gradient in held if gradient is not None)]

        return run_ranks(2, body)

    expected = trained(None)
    unlucky.clear()
    with pytest.warns(UserWarning, match="a gradient stays in memory"):
        found = trained(tmp_path)
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


def test_complex_parameters_are_tried_out_without_a_warning() -> None:
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    assert try_out(optimizer, optimizer.param_groups[0], parameter) == [torch.complex64]
