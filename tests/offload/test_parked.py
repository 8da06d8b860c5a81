"""parked: chunks, gradients and state leave the device and come back bit for bit. Meanwhile every use of the model is refused by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.adapters import adapted, same_bits
from tests.support.inside import accounts_of, chunks_of
from tests.support.models import WORLDS, Broken, mean_square, mlp
from tests.support.processes import Rank, on_ranks
from tests.support.ranks import ThreadCommunicator, run_mesh, run_ranks
from tests.support.reference import Turn, assert_close, on_two, process_group
from tests.support.stacks import loss_of, stack
from zero3 import ShardingPolicy
from zero3.core.full_buffer import MovableMemory


def storages(tensors: list[Tensor]) -> int:
    """The bytes of their memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def held(model: Any, optimizer: Any) -> list[Tensor]:
    """All that has values: chunks, gradients, kept ones, full buffers, state."""
    found = [chunk.shard for chunk in chunks_of(model)]
    found += [chunk.full.tensor for chunk in chunks_of(model) if not chunk.resident]
    found += [p.grad for p in model.parameters() if p.grad is not None]
    found += [tensor for account in accounts_of(model) for tensor in account.held]
    return found + [value for state in optimizer.state.values() for value in state.values() if value.ndim]


POLICIES: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, ""),
    "no_sync": ({}, "no_sync"),
    "no_sync in bf16": ({"reduce_dtype": torch.bfloat16, "grad_dtype": torch.float64}, "no_sync"),
    "stage 1": ({"stage": 1}, ""),
    "stage 2": ({"stage": 2}, ""),
    "resident": ({"resident_bytes": 10**6}, ""),
    "NF4": ({"quantize": zero3.NF4(block_size=64)}, ""),
    "whole": ({}, "whole"),
    "groups": ({}, "groups"),
    "transactional": ({"transactional": True}, "no_sync"),
    "masters": ({"param_dtype": torch.float32}, ""),
}


@WORLDS
@pytest.mark.parametrize("name", POLICIES)
def test_parked_in_files_changes_no_bit_of_training(name: str, world_size: int, tmp_path: Path) -> None:
    """After each backward, also where gradients wait for a later one; in the same objects, and 1 % of the bytes stay."""
    policy, how = POLICIES[name]
    build = adapted if name in ("resident", "NF4") else lambda: stack(3, words=400)
    ends = []
    for parks in (False, True):
        models = [build() for _ in range(world_size)]

        def body(group: ThreadCommunicator) -> list[Tensor]:
            model = zero3.shard(models[group.rank], process_group=process_group(group), policy=ShardingPolicy(**policy))  # noqa: B023
            groups: Any = zero3.get_trainable_chunk(model)
            if how in ("whole", "groups"):
                groups = zero3.param_groups(model, lambda name, info: {"whole": how == "whole" and info.ndim == 2, "lr": 0.01 * info.ndim})
            optimizer = torch.optim.AdamW(groups, lr=0.01)
            for step in range(3):
                for micro in range(2):
                    with zero3.no_sync(model) if how == "no_sync" and not micro else nullcontext():
                        loss_of(model, Turn(group.rank, 2 * step + micro, world_size)).backward()
                    if parks:  # noqa: B023
                        objects, shapes = list(model.parameters()), [(p.shape, p.dtype, p.device) for p in model.parameters()]
                        before = held(model, optimizer)
                        nbytes, large = storages(before), [t for t in before if t.numel() > 100]
                        with zero3.parked(model, optimizer, to=tmp_path / "made" / str(group.rank)):
                            assert storages([*before, *held(model, optimizer)]) <= (nbytes // 100 if large else nbytes) + 40 * len(before)
                            assert shapes == [(p.shape, p.dtype, p.device) for p in model.parameters()]
                            assert not any(bool((p == p).any()) for p in model.parameters() if p.is_floating_point() and p.numel())
                        assert all(one is other for one, other in zip(objects, model.parameters(), strict=True))
                optimizer.step()
                optimizer.zero_grad()
            return [*zero3.full_state_dict(model, rank0_only=False).values(), *(p.detach().clone() for p in model.parameters())]

        ends.append(run_ranks(world_size, body))
    assert all(same_bits(one, other) for one, other in zip(*ends, strict=True))
    assert not any(files for _, _, files in os.walk(tmp_path)), "no file is left"


def saves(model: Any, optimizer: Any, path: Path) -> None:
    zero3.save_checkpoint(path / "inside", model, optimizer)


def reads(model: Any, optimizer: Any, path: Path) -> None:
    zero3.full_params(model).__enter__()


INSIDE: dict[str, Callable[[Any, Any, Path], object]] = {
    "forward": lambda model, optimizer, path: loss_of(model, Turn(0, 0, 2)),
    "step": lambda model, optimizer, path: optimizer.step(),
    "step of another": lambda model, optimizer, path: torch.optim.SGD(zero3.get_trainable_chunk(model), lr=1.0).step(),
    "save_checkpoint": saves,
    "load_checkpoint": lambda model, optimizer, path: zero3.load_checkpoint(path / "before", model, optimizer),
    "save_pretrained": lambda model, optimizer, path: zero3.save_pretrained(model, path / "inside"),
    "full_state_dict": lambda model, optimizer, path: zero3.full_state_dict(model),
    "full_optimizer_state_dict": lambda model, optimizer, path: zero3.full_optimizer_state_dict(model, optimizer),
    "full_params": reads,
    "resident": lambda model, optimizer, path: zero3.resident(model).__enter__(),
    "stream_weights": lambda model, optimizer, path: zero3.stream_weights(model),
    "parked": lambda model, optimizer, path: zero3.parked(model).__enter__(),
    "clip_grad_norm_": lambda model, optimizer, path: zero3.clip_grad_norm_(model, 1.0),
    "torch's clip_grad_norm_": lambda model, optimizer, path: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "named_gradients": lambda model, optimizer, path: zero3.named_gradients(model),
    "fetch": lambda model, optimizer, path: zero3.fetch(model),
    "reset": lambda model, optimizer, path: zero3.reset(model),
    "the optimizer's state_dict": lambda model, optimizer, path: optimizer.state_dict(),
    "the optimizer's load_state_dict": lambda model, optimizer, path: optimizer.load_state_dict({"state": {}, "param_groups": []}),
}


@pytest.mark.parametrize("kept", [False, True], ids=["reduced", "kept"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("to", ["cpu", "files"])
def test_every_use_of_a_model_inside_parked_is_refused_before_any_collective(to: str, world_size: int, kept: bool, tmp_path: Path) -> None:
    models = [stack() for _ in range(world_size)]
    place = "cpu" if to == "cpu" else tmp_path / "parked"

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=process_group(group), policy=ShardingPolicy(stage=1 if kept else 3))
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1)
        loss_of(model, Turn(group.rank, 0, 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
        zero3.save_checkpoint(tmp_path / "before", model, optimizer)
        loss_of(model, Turn(group.rank, 1, 2)).backward()
        graph = loss_of(model, Turn(group.rank, 2, 2))
        before = [p.detach().clone() for p in model.parameters()]
        with zero3.parked(model, optimizer, to=place):
            made = len(group.log)
            for name, use in INSIDE.items():
                if group.rank == 0 or name != "torch's clip_grad_norm_":
                    if name == "torch's clip_grad_norm_" and (to == "cpu" or world_size == 1):
                        continue  # they have values, and one rank's are plain tensors
                    with pytest.raises(RuntimeError, match=r"inside zero3\.parked"):
                        use(model, optimizer, tmp_path)
            with pytest.raises(RuntimeError, match=r"begins a backward inside zero3\.parked"):
                graph.backward()
            assert len(group.log) == made
        assert same_bits([p.detach() for p in model.parameters()], before)
        assert not (tmp_path / "inside").exists()
        assert all(p.grad is not None for p in model.parameters()), "the refused backward has broken nothing"
        graph = loss_of(model, Turn(group.rank, 2, 2))
        assert all(p.grad is not None for p in model.parameters())
        graph.backward()
        optimizer.step()

    run_ranks(world_size, body)


def test_offload_optimizer_inside_parked_is_refused(tmp_path: Path) -> None:
    """It would take in a state whose values are elsewhere."""

    models = [stack() for _ in range(2)]

    def body(group: ThreadCommunicator) -> None:
        policy = ShardingPolicy(offload=tmp_path)
        model = zero3.shard(models[group.rank], process_group=process_group(group), policy=policy)
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1)
        loss_of(model, Turn(group.rank, 0, 2)).backward()
        optimizer.step()
        before = [value.clone() for state in optimizer.state.values() for value in state.values()]
        with zero3.parked(model, optimizer, to=tmp_path), pytest.raises(RuntimeError, match=r"offload_optimizer inside zero3\.parked"):
            zero3.offload_optimizer(optimizer)
        assert same_bits([value for state in optimizer.state.values() for value in state.values()], before)
        zero3.offload_optimizer(optimizer).step()

    run_ranks(2, body)


@pytest.mark.parametrize("policy", [{}, {"stage": 1}], ids=["no_sync", "stage 1"])
@pytest.mark.parametrize("refused", [False, True], ids=["others compute", "a refused forward"])
@pytest.mark.parametrize("to", ["cpu", "files"])
def test_gradients_that_wait_in_a_parked_part_are_no_zeroed_ones_for_forwards_outside(
    to: str, refused: bool, policy: dict[str, Any], tmp_path: Path
) -> None:
    """A forward of the rest dropped what the part had kept, in silence."""

    def train(model: Any, turn: Turn) -> None:
        model(turn.tensor(3, 5)).pow(2).mean().backward()

    def body(group: ThreadCommunicator) -> None:
        model: Any = mlp()
        for number, layer in enumerate(model):
            model[number] = zero3.Zero3Layer(layer, policy=ShardingPolicy(prefetch_depth=0, **policy), process_group=group)
        model = zero3.Zero3Sequential(model)
        with zero3.no_sync(model) if not policy else nullcontext():
            train(model, Turn(group.rank, 0, 2))
        with zero3.parked(model[1], to="cpu" if to == "cpu" else tmp_path):
            if refused:
                with pytest.raises(RuntimeError, match="parked"):
                    train(model, Turn(group.rank, 1, 2))
            else:
                with torch.no_grad():
                    model[0](Turn(group.rank, 1, 2).tensor(3, 5))
        train(model, Turn(group.rank, 2, 2))
        with zero3.full_gradients(model) as found:
            assert_close(found, {name: p.grad for name, p in plain.named_parameters()}, 1e-12, "gradients")

    plain = mlp()
    for step in (0, 2):
        for rank in range(2):
            (plain(Turn(rank, step, 2).tensor(3, 5)).pow(2).mean() / 2).backward()
    run_ranks(2, body)


@pytest.mark.parametrize("zeroing", ["to none", "to zeros", "not"])
@pytest.mark.parametrize("kept", [False, True], ids=["reduced", "kept"])
def test_what_is_zeroed_inside_parked_stays_so(zeroing: str, kept: bool, tmp_path: Path) -> None:
    def body(model: Any, group: ThreadCommunicator) -> dict[str, Tensor]:
        optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)
        with zero3.no_sync(model) if kept else nullcontext():
            loss_of(model, Turn(group.rank, 0, 2)).backward()
        with zero3.parked(model, optimizer, to=tmp_path):
            if zeroing != "not":
                optimizer.zero_grad(set_to_none=zeroing == "to none")
        if not kept and zeroing == "to zeros":
            assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
        if zeroing == "to none":
            assert all(p.grad is None for p in model.parameters())
        loss_of(model, Turn(group.rank, 1, 2)).backward()
        return {name: gradient.clone() for name, gradient in zero3.named_gradients(model).items()}

    def expect(model: Any, group: ThreadCommunicator) -> dict[str, Tensor]:
        if zeroing == "not":
            with zero3.no_sync(model) if kept else nullcontext():
                loss_of(model, Turn(group.rank, 0, 2)).backward()
        loss_of(model, Turn(group.rank, 1, 2)).backward()
        return {name: gradient.clone() for name, gradient in zero3.named_gradients(model).items()}

    for found, expected in zip(on_two(stack, body), on_two(stack, expect), strict=True):
        assert all(torch.allclose(found[name], value, rtol=1e-12, atol=1e-14) for name, value in expected.items())


def test_reading_and_writing_values_inside_parked_is_an_error_or_nothing(tmp_path: Path) -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1)
        loss_of(model, Turn(group.rank, 0, 2)).backward()
        optimizer.step()
        values = [*model.parameters(), *(v for state in optimizer.state.values() for v in state.values())]
        gradients = [p.grad for p in model.parameters()]
        before = [value.detach().clone() for value in values] + [p.grad.as_subclass(Tensor).clone() for p in model.parameters()]
        with zero3.parked(model, [optimizer], to=tmp_path):
            for value in values:
                repr(value), value.sum(), value.tolist()
                with torch.no_grad():
                    value.zero_()
                    value.data.fill_(3)
            for gradient in gradients:  # that the caller has kept
                repr(gradient), gradient.sum(), gradient.zero_()
            for p in model.parameters():
                with pytest.raises(RuntimeError, match=r"needs the values of a gradient inside zero3\.parked"):
                    p.grad.sum()
        after = [*(value.detach() for value in values), *(p.grad.as_subclass(Tensor) for p in model.parameters())]
        assert same_bits(after, before)

    on_two(stack, body)


@pytest.mark.parametrize("who", [[0, 1], [1]], ids=["all", "one"])
def test_after_an_exception_inside_parked_all_is_back_and_the_others_leave_normally(who: list[int], tmp_path: Path) -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(Broken) if group.rank in who else nullcontext(), zero3.parked(model, to=tmp_path / str(group.rank)):
            if group.rank in who:
                raise Broken("the engine is gone")
        assert same_bits([p.detach() for p in model.parameters()], before)
        loss_of(model, Turn(group.rank, 0, 2)).backward()

    on_two(stack, body)


@pytest.mark.parametrize("many", [True, False], ids=["two ranks", "one rank"])
def test_memory_that_is_short_at_the_end_of_parked_loses_nothing(many: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks stay parked, and leave again when there is room."""
    world_size, take = 1 + many, MovableMemory.take
    models, taken, short = [stack() for _ in range(world_size)], [0], [True]
    last = world_size - 1

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=process_group(group))
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1)
        loss_of(model, Turn(group.rank, 0, 2)).backward()
        optimizer.step()
        before = [t.clone() for t in (*(p.detach() for p in model.parameters()), *(p.grad.as_subclass(Tensor) for p in model.parameters()))]
        mine = {MovableMemory(chunk.shard).bytes.untyped_storage()._cdata for chunk in chunks_of(model)}

        def scarce(memory: MovableMemory) -> None:
            if group.rank == last and short[0] and memory.bytes.untyped_storage()._cdata in mine:
                taken[0] += 1
                if taken[0] == 2:
                    raise MemoryError("no room")
            take(memory)

        if group.rank == last:
            monkeypatch.setattr(MovableMemory, "take", scarce)
        context = zero3.parked(model, optimizer, to=tmp_path)
        context.__enter__()
        with pytest.raises(
            RuntimeError, match=rf"{'rank 1: ' * many}[1-9]\d+ bytes that were parked could not come back .MemoryError: no room"
        ):
            context.__exit__(None, None, None)
        assert taken[0] == 2
        with pytest.raises(RuntimeError, match=r"inside zero3\.parked"):
            loss_of(model, Turn(group.rank, 1, 2))
        if group.rank == last:
            assert storages([p.data for p in model.parameters()]) <= 16 * len(list(model.parameters()))
            short[0] = False
        context.__exit__(None, None, None)
        after = [*(p.detach() for p in model.parameters()), *(p.grad.as_subclass(Tensor) for p in model.parameters())]
        assert same_bits(after, before)
        loss_of(model, Turn(group.rank, 1, 2)).backward()

    run_ranks(world_size, body)


def test_parked_refuses_by_name_on_all_ranks_and_nothing_has_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    strangers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(2, 3))]) for _ in range(2)]

    def body(model: Any, group: ThreadCommunicator) -> None:
        optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)
        chunks = list(model.parameters())
        before = [p.detach().clone() for p in chunks]

        def refused(error: type[Exception], text: str, optimizer: Any = optimizer, **options: Any) -> None:
            with pytest.raises(error, match=text):
                zero3.parked(model, optimizer, **options).__enter__()
            assert same_bits([p.detach() for p in chunks], before)

        refused(ValueError, r"rank 1: parked: the optimizer holds 1 parameters", strangers[1] if group.rank else optimizer)
        refused(TypeError, "rank 0: expected a torch.optim.Optimizer", "AdamW")
        refused(TypeError, r'rank 0: parked\(to=\) must be "cpu" or a directory, found 3', to=3)
        refused(ValueError, r"rank 1: parked\(to=\) must be .*, found an empty text", to="" if group.rank else tmp_path)
        refused(ValueError, r"rank 0: parked\(to=\) must be .*, found 'disk'. Did you mean", to="disk")
        refused(OSError, "rank 1: ", to=tmp_path / ("file" if group.rank else "fine") / "inside")
        refused(ValueError, "ranks differ in parked", to="cpu" if group.rank else tmp_path)
        with zero3.full_params(model):
            refused(RuntimeError, "parked inside full_params")
        with zero3.step_guard(model):
            refused(RuntimeError, "parked inside step_guard")
        loss = loss_of(model, Turn(group.rank, 0, 2))
        loss.register_hook(lambda _: refused(RuntimeError, "parked inside a forward or a backward"))
        loss.backward()

    on_two(stack, body)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        zero3.parked(zero3.shard(stack()), to=tmp_path / "full").__enter__()
    assert not any(files for place, _, files in os.walk(tmp_path) if place != str(tmp_path))


def test_parked_makes_one_agreement_at_its_beginning_and_one_at_its_end(tmp_path: Path) -> None:
    def body(mesh: Any) -> None:
        model = zero3.shard(models[mesh.rank], process_group=mesh)
        loss_of(model, Turn(mesh.rank, 0, 4)).backward()
        logs = [mesh._row.log, mesh._column.log]
        before = [len(log) for log in logs]
        with zero3.parked(model, to=tmp_path):
            assert [[each.kind for each in log[start:]] for log, start in zip(logs, before, strict=True)] == [["exchange"]] * 2
        assert [[each.kind for each in log[start:]] for log, start in zip(logs, before, strict=True)] == [["exchange"] * 2] * 2
        loss_of(model, Turn(mesh.rank, 0, 4)).backward()

    models = [stack() for _ in range(4)]
    run_mesh(2, 2, body)


def test_an_open_graph_survives_parked(tmp_path: Path) -> None:
    """The forward before, the backward after it."""

    def body(model: Any, group: ThreadCommunicator) -> None:
        loss = loss_of(model, Turn(group.rank, 0, 2))
        with zero3.parked(model, to=tmp_path):
            pass
        loss.backward()
        found = [p.grad.as_subclass(Tensor).clone() for p in model.parameters()]
        model.zero_grad()
        loss_of(model, Turn(group.rank, 0, 2)).backward()
        assert same_bits(found, [p.grad.as_subclass(Tensor) for p in model.parameters()])

    on_two(stack, body)


def test_parked_takes_groups_of_which_a_rank_has_nothing() -> None:
    """Of one whole matrix two of three ranks have no part: `param_groups` gives their groups an empty parameter."""

    def body(group: ThreadCommunicator) -> list[int]:
        model = zero3.shard(mlp(1), layers=[nn.Sequential], process_group=group)
        groups = zero3.param_groups(model, lambda name, info: {"whole": info.ndim == 2})
        optimizer = zero3.OptimizerList(*[torch.optim.AdamW([each], lr=0.1) for each in groups])
        mean_square(model, Turn(group.rank, 0, 1))
        optimizer.step()
        before = zero3.full_state_dict(model, rank0_only=False)
        with zero3.parked(model, optimizer):
            pass
        assert_close(zero3.full_state_dict(model, rank0_only=False), before, 0, "values")
        return [p.numel() for each in groups for p in each["params"]]

    assert any(0 in found for found in run_ranks(3, body))


def train(rank: Rank, parks: bool) -> list[float]:
    model = zero3.shard(stack(4))
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.01)
    for step in range(3):
        loss_of(model, Turn(rank.number, step, rank.world_size)).backward()
        with zero3.parked(model, optimizer, to=rank.scratch) if parks else nullcontext():
            pass
        optimizer.step()
        optimizer.zero_grad()
    return [value.sum().item() for value in zero3.full_state_dict(model, rank0_only=False).values()]


@pytest.mark.slow
def test_parked_on_processes() -> None:
    assert on_ranks(2, train, True) == on_ranks(2, train, False)
