"""Parameters that no gradient reached since gradients were zeroed are left alone, as plain torch leaves them: no gradient, no decay, no
momentum, no step counted. In one process all ranks' micro-batches are added up.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.ranks import ThreadCommunicator, ThreadPartsCommunicator, run_mesh, run_ranks
from tests.support.reference import assert_close
from zero3 import Int8, ShardingPolicy
from zero3.core.reached import Reached

WIDTH, STEPS = 4, 4
Use = Callable[[int, int, int, int], set[str]]  # block, step, rank and number of ranks -> what of the block computes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3 * WIDTH + 1)
        self.use: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        y = x + torch.tanh(self.a(x)) if "a" in self.use else x * 1
        return y + torch.tanh(self.b(x))[..., :WIDTH] if "b" in self.use else y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.tell: Any = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def seldom(block: int, step: int, rank: int, ranks: int) -> set[str]:
    """Chunks can follow it: a chunk's parameters are reached in the same steps, or never."""
    if block == 0:
        return {"a"}  # b: never, on any rank
    if block == 1:
        return {"a", "b"} if step % 2 else set()
    return {"a", "b"} if rank == ranks - 1 or block == 3 else {"a"}  # b of block 2: the last rank alone


def changing(block: int, step: int, rank: int, ranks: int) -> set[str]:
    """b of the last block in some steps only: that is a count of steps of its own."""
    return {"a", "b"} if block == 3 and step in (1, 3) else {"a"} if block == 3 else seldom(block, step, rank, ranks)


def batch(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=generator)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.3)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.3)


Make = Callable[[Any], torch.optim.Optimizer]


def loss_of(model: Any, modules: list[Any], use: Use, place: tuple[int, int, int, int]) -> Tensor:
    step, micro, rank, ranks = place
    for number, block in enumerate(modules):
        block.use = use(number, step, rank, ranks)
    loss: Tensor = model(batch(step, micro, rank)).pow(2).sum()
    return loss


class Plain:
    """All ranks in one process. `nothing`: the names without a gradient before each step."""

    def __init__(self, ranks: int, use: Use, make: Make, micros: int = 1) -> None:
        self.model, self.nothing, self.norms = net(), [], []
        self.optimizer = make(self.model.parameters())
        for step in range(STEPS):
            for micro in range(micros):
                for rank in range(ranks):
                    (loss_of(self.model, list(self.model.blocks), use, (step, micro, rank, ranks)) / ranks).backward()
            self.nothing.append({name for name, p in self.model.named_parameters() if p.grad is None})
            self.norms.append({name: p.grad.norm() for name, p in self.model.named_parameters() if p.grad is not None})
            self.optimizer.step()
            self.optimizer.zero_grad()


def chunks_of(model: Any) -> Any:
    return zero3.get_trainable_chunk(model)


def apart(model: Any) -> Any:
    return zero3.param_groups(model, lambda name, info: {"align": 2})


def by_name(model: Any) -> Any:
    return zero3.param_groups(model, lambda name, info: {"name": name})


def whole(model: Any) -> Any:
    return zero3.param_groups(model, lambda name, info: {"whole": True})


def train(group: Any, model: Any, use: Use, given: tuple[Any, Make], micros: int, around: Any) -> tuple[list[set[str]], Any, Any]:
    """Returns the names without a gradient before each step, the model and the optimizer."""
    modules = list(model.blocks)
    zero3.shard(model, Block, process_group=group[0], policy=group[1])
    optimizer = given[1](given[0](model))
    nothing = []
    names = {name for name, _ in net().named_parameters()}
    for step in range(STEPS):
        for micro in range(micros):
            with around(model, micro == micros - 1):
                loss_of(model, modules, use, (step, micro, group[2], group[3])).backward()
        norms = zero3.parameter_norms(model)
        nothing.append(names - zero3.named_gradients(model).keys())
        assert all(not norms[name] for name in nothing[-1]) and norms.keys() == names
        with zero3.full_gradients(model) as gradients:
            assert names - gradients.keys() == nothing[-1]
        optimizer.step()
        optimizer.zero_grad()
    return nothing, model, optimizer


def alone(model: Any, last: bool) -> AbstractContextManager[Any]:
    return nullcontext()


def kept(model: Any, last: bool) -> AbstractContextManager[Any]:
    return nullcontext() if last else zero3.no_sync(model)


def in_replicas(model: Any, last: bool) -> AbstractContextManager[Any]:
    return nullcontext() if last else zero3.no_sync(model, replicas_only=True)


def guarded(model: Any, last: bool) -> AbstractContextManager[Any]:
    return zero3.step_guard(model)


def compare(
    world: tuple[int, int],
    policy: ShardingPolicy,
    use: Use,
    given: tuple[Any, Make],
    micros: int = 1,
    around: Any = alone,
    kind: Any = None,
) -> None:
    replicas, shards = world
    ranks = max(1, replicas) * shards
    plain = Plain(ranks, use, given[1], micros)
    models = [net() for _ in range(ranks)]

    def body(group: Any) -> Any:
        nothing, model, _ = train((group, policy, group.rank, ranks), models[group.rank], use, given, micros, around)
        return nothing, zero3.full_state_dict(model, rank0_only=False)

    found = run_mesh(replicas, shards, body, kind=kind) if replicas else run_ranks(shards, body, kind=kind)
    for nothing, values in found:
        assert nothing == plain.nothing
        assert_close(values, plain.model.state_dict(), 1e-9, "parameters")


POLICIES: dict[str, dict[str, Any]] = {
    "stage 3": {}, "stage 2": {"stage": 2}, "stage 1": {"stage": 1}, "transactional": {"transactional": True}, "dynamic": {"dynamic": True},
    "no prefetch": {"prefetch_depth": 0}, "reduce_format": {"reduce_format": Int8(block_size=1)}, "sum": {},
}  # fmt: skip


@pytest.mark.parametrize("kind", [ThreadCommunicator, ThreadPartsCommunicator], ids=["buffers", "pieces"])
@pytest.mark.parametrize("make", [adamw, sgd])
@pytest.mark.parametrize("world", [(0, 1), (0, 2), (0, 3), (2, 1), (2, 2)], ids=str)
def test_unreached_parameters_are_as_in_plain_torch(world: tuple[int, int], make: Make, kind: Any) -> None:
    compare(world, ShardingPolicy(), seldom, (chunks_of, make), kind=kind)


@pytest.mark.parametrize("groups", [apart, by_name, whole])
@pytest.mark.parametrize("world", [(0, 1), (0, 2), (0, 3), (2, 2)], ids=str)
def test_param_groups_count_the_steps_of_unreached_parameters_apart(world: tuple[int, int], groups: Any) -> None:
    compare(world, ShardingPolicy(), changing, (groups, adamw))


@pytest.mark.parametrize("name", ["stage 2", "stage 1", "transactional", "dynamic", "no prefetch"])
@pytest.mark.parametrize("around", [alone, kept, guarded])
def test_unreached_parameters_under_any_policy(name: str, around: Any) -> None:
    if around is guarded and name in ("stage 2", "stage 1", "dynamic"):
        name = "stage 3"  # the others are refused
    compare((0, 2), ShardingPolicy(**POLICIES[name]), seldom, (chunks_of, adamw), 2, around)


@pytest.mark.parametrize("around", [alone, kept, in_replicas])
@pytest.mark.parametrize("policy", [{}, {"stage": 1}])
def test_unreached_parameters_on_a_mesh_with_micro_batches(around: Any, policy: dict[str, Any]) -> None:
    compare((2, 2), ShardingPolicy(**policy), seldom, (chunks_of, adamw), 2, around)


@pytest.mark.parametrize(("in_backward", "scheduled"), [(False, False), (False, True), (True, True)])
def test_unreached_parameters_in_files(tmp_path: Path, in_backward: bool, scheduled: bool) -> None:
    """A chunk whose gradient comes to nothing is not stepped inside of backward either."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return zero3.offload_optimizer(adamw(parameters), in_backward=in_backward)

    plain = Plain(2, seldom, adamw)
    models = [net() for _ in range(2)]

    def body(group: ThreadCommunicator) -> Any:
        model, modules = models[group.rank], list(models[group.rank].blocks)
        zero3.shard(model, Block, process_group=group, policy=ShardingPolicy(offload=tmp_path))
        optimizer = make(zero3.get_trainable_chunk(model))
        if scheduled:  # it wraps the step, which still leaves things alone itself
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
            assert vars(optimizer)["step"].zero3_leaves_alone
        for step in range(STEPS):
            loss_of(model, modules, seldom, (step, 0, group.rank, 2)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return zero3.full_state_dict(model, rank0_only=False)

    for values in run_ranks(2, body):
        assert_close(values, plain.model.state_dict(), 1e-9, "parameters")


def test_compressed_reductions_say_which_slots_were_reached() -> None:
    """Codes round, so that numbers differ; which have no gradient does not."""
    plain, models = Plain(3, seldom, sgd), [net() for _ in range(3)]
    policy = ShardingPolicy(reduce_format=Int8(block_size=4))

    def body(group: ThreadCommunicator) -> Any:
        nothing, model, _ = train((group, policy, group.rank, 3), models[group.rank], seldom, (chunks_of, sgd), 1, alone)
        return nothing, zero3.full_state_dict(model, rank0_only=False)

    for nothing, values in run_ranks(3, body):
        assert nothing == plain.nothing
        for name, value in plain.model.state_dict().items():
            assert torch.allclose(values[name], value, atol=5e-2)
        for name in set.intersection(*plain.nothing):
            assert torch.equal(values[name], plain.model.state_dict()[name])


# -- what is not told, and what is


def test_where_all_parameters_are_reached_nobody_reads_what_others_say(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: Reached) -> Any:
        raise AssertionError("a rank has read a trailer")

    monkeypatch.setattr(Reached, "slots", read)
    compare((0, 2), ShardingPolicy(), lambda *_: {"a", "b"}, (chunks_of, adamw))
    with pytest.raises(AssertionError, match="a rank has read"):
        compare((0, 2), ShardingPolicy(), seldom, (chunks_of, adamw))


def test_unreached_parameters_are_named_once_on_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "zero3")
    models = [net() for _ in range(2)]

    def body(group: ThreadCommunicator) -> None:
        train((group, ShardingPolicy(), group.rank, 2), models[group.rank], seldom, (chunks_of, adamw), 1, alone)

    run_ranks(2, body)
    (said,) = [record.getMessage() for record in caplog.records if "no gradient reached" in record.getMessage()]
    assert "b.weight" in said and "blocks.0" in said and "blocks.2" not in said and "param_groups" in said
    caplog.clear()
    compare((0, 2), ShardingPolicy(), lambda *_: {"a", "b"}, (chunks_of, adamw))
    assert not [record for record in caplog.records if "no gradient reached" in record.getMessage()]


@pytest.mark.parametrize("world_size", [1, 2])
def test_clip_grad_norm_counts_unreached_parameters_as_nothing(world_size: int) -> None:
    plain, models = net(), [net() for _ in range(world_size)]
    for rank in range(world_size):
        (loss_of(plain, list(plain.blocks), seldom, (0, 0, rank, world_size)) / world_size).backward()
    wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)

    def body(group: ThreadCommunicator) -> Tensor:
        model, modules = models[group.rank], list(models[group.rank].blocks)
        zero3.shard(model, Block, process_group=group)
        loss_of(model, modules, seldom, (0, 0, group.rank, world_size)).backward()
        return zero3.clip_grad_norm_(model, 0.1)

    for norm in run_ranks(world_size, body):
        assert torch.equal(norm, wanted) if world_size == 1 else torch.allclose(norm, wanted, rtol=1e-12)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_decides_since_when_a_parameter_is_reached(set_to_none: bool, stage: int) -> None:
    """A gradient that is zeroed in place stays one, also in plain torch: it decays."""
    use: Use = lambda block, step, rank, ranks: {"a", "b"} if step == 0 else {"a"}  # noqa: E731
    plain, models = net(), [net() for _ in range(2)]
    optimizer = sgd(plain.parameters())
    for step in range(2):
        for rank in range(2):
            (loss_of(plain, list(plain.blocks), use, (step, 0, rank, 2)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)

    def body(group: ThreadCommunicator) -> Any:
        model, modules = models[group.rank], list(models[group.rank].blocks)
        zero3.shard(model, Block, process_group=group, policy=ShardingPolicy(stage=stage))
        optimizer = sgd(zero3.get_trainable_chunk(model))
        for step in range(2):
            loss_of(model, modules, use, (step, 0, group.rank, 2)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        return zero3.full_state_dict(model, rank0_only=False)

    for values in run_ranks(2, body):
        assert_close(values, plain.state_dict(), 1e-9, "parameters")


def test_a_penalty_over_chunks_reaches_all_of_their_elements() -> None:
    plain, models = net(), [net() for _ in range(2)]
    optimizer = sgd(plain.parameters())
    for step in range(2):
        for rank in range(2):
            (loss_of(plain, list(plain.blocks), seldom, (step, 0, rank, 2)) / 2).backward()
        sum(p.pow(2).sum() for p in plain.parameters()).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()

    def body(group: ThreadCommunicator) -> Any:
        model, modules = models[group.rank], list(models[group.rank].blocks)
        zero3.shard(model, Block, process_group=group)
        optimizer = sgd(model.parameters())
        for step in range(2):
            loss_of(model, modules, seldom, (step, 0, group.rank, 2)).backward()
            sum(p.pow(2).sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        return zero3.full_state_dict(model, rank0_only=False)

    for values in run_ranks(2, body):
        assert_close(values, plain.state_dict(), 1e-9, "parameters")


@pytest.mark.parametrize("stage", [1, 3])
def test_a_closure_of_step_runs_the_backward_that_leaves_parameters_unreached(stage: int) -> None:
    plain, models = Plain(2, seldom, sgd), [net() for _ in range(2)]

    def body(group: ThreadCommunicator) -> Any:
        model, modules = models[group.rank], list(models[group.rank].blocks)
        zero3.shard(model, Block, process_group=group, policy=ShardingPolicy(stage=stage))
        optimizer = sgd(zero3.get_trainable_chunk(model))
        for step in range(STEPS):

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, modules, seldom, (step, 0, group.rank, 2))  # noqa: B023
                loss.backward()
                return loss

            optimizer.step(closure)  # type: ignore[arg-type]
        return zero3.full_state_dict(model, rank0_only=False)

    for values in run_ranks(2, body):
        assert_close(values, plain.model.state_dict(), 1e-9, "parameters")


def test_a_hook_of_a_chunk_that_no_gradient_reached_is_not_called() -> None:
    models = [net() for _ in range(2)]

    def body(group: ThreadCommunicator) -> list[int]:
        model, modules = models[group.rank], list(models[group.rank].blocks)
        zero3.shard(model, Block, process_group=group)
        called: list[int] = []
        for number, chunk in enumerate(zero3.get_trainable_chunk(model)):
            chunk.register_post_accumulate_grad_hook(lambda _, number=number: called.append(number))
        loss_of(model, modules, seldom, (0, 0, group.rank, 2)).backward()
        return sorted(called)

    assert run_ranks(2, body) == [[0, 2, 3]] * 2


# -- the optimizer's state


def test_state_of_unreached_parameters_is_saved_and_loaded(tmp_path: Path) -> None:
    """Steps differ between parameters, and one has no state; other ranks go on with them."""
    plain = Plain(2, changing, adamw)
    models = [net() for _ in range(2)]

    def save(group: ThreadCommunicator) -> Any:
        _, model, optimizer = train((group, ShardingPolicy(), group.rank, 2), models[group.rank], changing, (apart, adamw), 1, alone)
        zero3.save_checkpoint(tmp_path / "saved", model, optimizer)
        return zero3.full_optimizer_state_dict(model, optimizer, rank0_only=False)

    state = run_ranks(2, save)[0]
    names = [name for name, _ in plain.model.named_parameters()]
    wanted = {name: plain.optimizer.state[p] for name, p in plain.model.named_parameters() if p in plain.optimizer.state}
    assert state["state"].keys() == wanted.keys() != set(names)
    for name, values in wanted.items():
        assert_close(state["state"][name], dict(values), 1e-9, name)

    reference, optimizer = copy.deepcopy(plain.model), adamw(plain.model.parameters())
    optimizer.load_state_dict(plain.optimizer.state_dict())
    for rank in range(3):
        (loss_of(plain.model, list(plain.model.blocks), lambda *_: {"a", "b"}, (9, 0, rank, 3)) / 3).backward()
    optimizer.step()
    others = [net() for _ in range(3)]

    def load(group: ThreadCommunicator) -> Any:
        model, modules = others[group.rank], list(others[group.rank].blocks)
        zero3.shard(model, Block, process_group=group)
        optimizer = adamw(apart(model))
        zero3.load_checkpoint(tmp_path / "saved", model, optimizer)
        assert_close(zero3.full_state_dict(model, rank0_only=False), reference.state_dict(), 1e-9, "loaded")
        loss_of(model, modules, lambda *_: {"a", "b"}, (9, 0, group.rank, 3)).backward()
        optimizer.step()
        return zero3.full_state_dict(model, rank0_only=False)

    for values in run_ranks(3, load):
        assert_close(values, plain.model.state_dict(), 1e-9, "after a step")


@pytest.mark.parametrize("make", [sgd, lambda given: torch.optim.Rprop(given, lr=0.01), lambda given: Averaging(given)], ids=str)
def test_chunks_take_the_state_of_plain_torch_where_a_parameter_has_none(make: Make) -> None:
    never: Use = lambda block, step, rank, ranks: {"a"}  # noqa: E731
    plain = Plain(2, never, make)
    names = [name for name, _ in plain.model.named_parameters()]
    numbered = copy.deepcopy(plain.optimizer.state_dict())
    state = {
        "state": {names[number]: each for number, each in numbered["state"].items()},
        "param_groups": [{**group, "params": [names[number] for number in group["params"]]} for group in numbered["param_groups"]],
    }
    values = copy.deepcopy(plain.model.state_dict())
    for rank in range(2):
        (loss_of(plain.model, list(plain.model.blocks), lambda *_: {"a", "b"}, (9, 0, rank, 2)) / 2).backward()
    plain.optimizer.step()
    models = [net() for _ in range(2)]

    def body(group: ThreadCommunicator) -> Any:
        model, modules = models[group.rank], list(models[group.rank].blocks)
        zero3.shard(model, Block, process_group=group)
        optimizer = make(zero3.get_trainable_chunk(model))
        zero3.load_full_state_dict(model, values)
        zero3.load_full_optimizer_state_dict(model, optimizer, state)
        loss_of(model, modules, lambda *_: {"a", "b"}, (9, 0, group.rank, 2)).backward()
        optimizer.step()
        return zero3.full_state_dict(model, rank0_only=False)

    for found in run_ranks(2, body):
        assert_close(found, plain.model.state_dict(), 1e-9, "after a step")


class Averaging(torch.optim.Optimizer):
    """Keeps an average of the values, which begins as a copy of them, and decays."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05, "weight_decay": 0.3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    mean = state.setdefault("mean", p.clone())
                    p.sub_(group["lr"] * (p.grad + group["weight_decay"] * p))
                    mean.lerp_(p, 0.5)
                    p.copy_(mean)


def strongly(given: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(given, lr=0.05, momentum=0.9, weight_decay=0.6)  # momentum is nearer to the values than to 0


@pytest.mark.parametrize("make", [Averaging, strongly, lambda given: torch.optim.Rprop(given, lr=0.01)], ids=["an average", "SGD", "Rprop"])
def test_state_that_a_step_makes_for_unreached_elements_is_as_an_optimizer_begins(make: Make) -> None:
    use: Use = lambda block, step, rank, ranks: {"a", "b"} if step > 1 else {"a"}  # noqa: E731
    compare((0, 2), ShardingPolicy(), use, (chunks_of, make))


# -- what users do between backward and step


A_ALONE: Use = lambda block, step, rank, ranks: {"a"}  # noqa: E731
FULL_FIRST: Use = lambda block, step, rank, ranks: {"a"} if step else {"a", "b"}  # noqa: E731


def lives(use: Use, given: tuple[Any, Make], between: Callable[[int, Any, list[Any]], None], after: Any = None, ranks: int = 2) -> None:
    """Compares a training with that of plain torch, if between backward and step `between` gets the step, optimizer and parameters, and
    after it `after` does (by default gradients are zeroed).
    """
    plain, models = net(), [net() for _ in range(ranks)]

    def live(model: Any, modules: list[Any], parameters: Any, own: list[int], count: int) -> None:
        optimizer = given[1](parameters)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        for step in range(STEPS):
            for rank in own:
                (loss_of(model, modules, use, (step, 0, rank, ranks)) / count).backward()
            between(step, optimizer, held)
            optimizer.step()
            optimizer.zero_grad() if after is None else after(step, optimizer, held)

    live(plain, list(plain.blocks), plain.parameters(), list(range(ranks)), ranks)

    def body(group: ThreadCommunicator) -> Any:
        model, modules = models[group.rank], list(models[group.rank].blocks)
        zero3.shard(model, Block, process_group=group)
        live(model, modules, given[0](model), [group.rank], 1)
        return zero3.full_state_dict(model, rank0_only=False)

    for values in run_ranks(ranks, body):
        assert_close(values, plain.state_dict(), 1e-9, "parameters")


def nothing_more(step: int, optimizer: Any, held: list[Any]) -> None:
    return None


def two_groups(model: Any) -> Any:
    return zero3.param_groups(model, lambda name, info: {"first": "b.bias" not in name})


@pytest.mark.parametrize("kept", ["zeroed in place", "cloned"])
def test_a_part_whose_gradient_stays_does_not_hide_that_another_ones_is_unreached(kept: str) -> None:
    """One group's gradients stay as zeros; the other's go. Then b is reached by nobody: its weights are zeros, its bias is None."""

    def after(step: int, optimizer: Any, held: list[Any]) -> None:
        bias = {id(p) for p in held if p.shape == (3 * WIDTH + 1,)} or {id(p) for p in optimizer.param_groups[-1]["params"]}
        for p in held:
            if id(p) in bias or p.grad is None:
                p.grad = None
            elif kept == "cloned":
                p.grad = p.grad.clone()
            else:
                p.grad.zero_()

    lives(FULL_FIRST, (two_groups, sgd), nothing_more, after)


def halved(step: int, optimizer: Any, held: list[Any]) -> None:
    for p in held:
        if p.grad is not None:
            p.grad = p.grad * 0.5


@pytest.mark.parametrize("use", [A_ALONE, seldom])
def test_a_gradient_that_is_replaced_is_still_of_what_was_reached(use: Use) -> None:
    lives(use, (chunks_of, adamw), halved)


class Failing(torch.optim.SGD):
    """Its second step raises, after it has changed values. Its base's step is one of its own."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(0.9)
        super().step(closure)
        self.count += 1
        if self.count == 2:
            raise KeyError("once")
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(0.9)


def test_a_subclass_that_changes_values_around_its_base_class_is_left_alone_as_a_whole_and_may_raise() -> None:
    """In a process that has made a plain SGD before: torch calls its hooks around each of both. What was put aside for a step that
    raised is not put back by the next one.
    """
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)

    def failing(parameters: Any) -> torch.optim.Optimizer:
        return Failing(parameters, lr=0.05, momentum=0.9, weight_decay=0.3)

    def raises(step: int, optimizer: Any, held: list[Any]) -> None:
        if step == 1:
            before, state = [p.detach().clone() for p in held], copy.deepcopy(optimizer.state_dict())
            with pytest.raises(KeyError):
                optimizer.step()
            optimizer.load_state_dict(state)
            with torch.no_grad():
                for p, value in zip(held, before, strict=True):
                    p.copy_(value)

    lives(lambda block, step, rank, ranks: {"a"} if step < 2 else {"a", "b"}, (chunks_of, failing), raises)
    lives(lambda block, step, rank, ranks: {"a"}, (chunks_of, failing), raises)


def test_a_parameter_that_a_group_gets_later_is_left_alone_too() -> None:
    def late(parameters: Any) -> torch.optim.Optimizer:
        first, *others = list(parameters)
        optimizer = sgd([first])
        optimizer.others = others  # type: ignore[attr-defined]
        return optimizer

    def append(step: int, optimizer: Any, held: list[Any]) -> None:
        if step == 1:
            optimizer.param_groups[0]["params"] += optimizer.others

    models = [net() for _ in range(2)]

    def body(group: ThreadCommunicator) -> Any:
        model, modules = models[group.rank], list(models[group.rank].blocks)
        zero3.shard(model, Block, process_group=group)
        optimizer = late(zero3.get_trainable_chunk(model))
        for step in range(STEPS):
            loss_of(model, modules, A_ALONE, (step, 0, group.rank, 2)).backward()
            append(step, optimizer, [])
            optimizer.step()
            optimizer.zero_grad()
        return zero3.full_state_dict(model, rank0_only=False)

    for values in run_ranks(2, body):
        for name, value in net().state_dict().items():
            assert ".b." not in name or torch.equal(values[name], value), name


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_penalty_counts_in_norms_names_and_clipping_as_it_does_in_the_step(world_size: int) -> None:
    plain, models = net(), [net() for _ in range(world_size)]
    for rank in range(world_size):
        (loss_of(plain, list(plain.blocks), A_ALONE, (0, 0, rank, world_size)) / world_size).backward()
    sum(p.pow(2).sum() for p in plain.parameters()).backward()  # type: ignore[union-attr]
    norms = {name: p.grad.norm() for name, p in plain.named_parameters() if p.grad is not None}
    total = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)

    def body(group: ThreadCommunicator) -> Any:
        model, modules = models[group.rank], list(models[group.rank].blocks)
        zero3.shard(model, Block, process_group=group)
        loss_of(model, modules, A_ALONE, (0, 0, group.rank, world_size)).backward()
        sum(p.pow(2).sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
        with zero3.full_gradients(model) as gradients:
            names = set(gradients)
        return zero3.parameter_norms(model), names, zero3.clip_grad_norm_(model, 0.1)

    for found, names, clipped in run_ranks(world_size, body):
        assert_close(found, norms, 1e-9, "norms")
        assert names == norms.keys()
        assert torch.allclose(clipped, total, rtol=1e-12)


def test_no_hook_is_called_by_a_backward_that_reaches_nothing_of_a_chunk() -> None:
    """Neither a tensor's hooks nor those behind the accumulation, also in a later micro-batch."""
    models = [net() for _ in range(2)]
    micros = ({"a"}, set[str](), {"a", "b"})

    def body(group: ThreadCommunicator) -> list[tuple[str, int]]:
        model, modules = models[group.rank], list(models[group.rank].blocks)
        zero3.shard(model, Block, process_group=group)
        called: list[tuple[str, int]] = []
        chunk = zero3.get_trainable_chunk(model)[1]
        for number, used in enumerate(micros):
            before = chunk.register_hook(lambda _, number=number: called.append(("before", number)))
            after = chunk.register_post_accumulate_grad_hook(lambda _, number=number: called.append(("after", number)))
            loss_of(model, modules, lambda block, *_, used=used: used if block == 1 else {"a", "b"}, (0, number, group.rank, 2)).backward()
            before.remove()
            after.remove()
        return called

    assert run_ranks(2, body) == [[("before", 0), ("after", 0), ("before", 2), ("after", 2)]] * 2


def test_what_a_backward_had_reached_that_raised_is_forgotten() -> None:
    """The gradients of its last layers have landed already."""
    models, plain = [net() for _ in range(2)], Plain(2, A_ALONE, sgd)

    def body(group: ThreadCommunicator) -> Any:
        model, modules = models[group.rank], list(models[group.rank].blocks)
        zero3.shard(model, Block, process_group=group)
        optimizer = sgd(zero3.get_trainable_chunk(model))

        def fail(gradient: Tensor) -> None:
            raise KeyError("once")

        x = batch(0, 0, group.rank).requires_grad_()
        for block in modules:
            block.use = {"a"}
        y = x * 1
        y.register_hook(fail)
        with pytest.raises(KeyError):
            model(y).pow(2).sum().backward()
        for step in range(STEPS):
            loss_of(model, modules, A_ALONE, (step, 0, group.rank, 2)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return zero3.full_state_dict(model, rank0_only=False)

    for values in run_ranks(2, body):
        assert_close(values, plain.model.state_dict(), 1e-9, "parameters")
