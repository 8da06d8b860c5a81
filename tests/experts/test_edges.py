"""Experts at home where something is unusual: one row, odd lengths, further arguments, buffers, calls in another order, layers by hand."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.experts.test_outside import HOME, exchanges
from tests.support.experts import Experts, H, Training, made, tokens
from tests.support.inside import states_of
from tests.support.ranks import run_ranks

Policy = zero3.ShardingPolicy


class Scaled(Experts):
    """It takes something else than tokens, too."""

    def forward(self, x: Tensor, which: Tensor, how_much: Tensor, scale: Any = 1.0) -> Tensor:
        return super().forward(x, which, how_much) * scale


class Lone(nn.Module):
    """Nothing but experts, called with what is given."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.first, self.experts = nn.Linear(1, 1), experts

    def forward(self, *inputs: Any) -> Tensor:
        return self.experts(*inputs)


def lone(
    group: Any, kind: type[Experts] = Experts, experts: int = 2, dtype: torch.dtype = torch.float64, policy: Any = HOME
) -> tuple[Lone, Lone]:
    models = []
    for _ in range(2):  # ranks are threads, and share torch's own generator
        dice, model = torch.Generator().manual_seed(0), Lone(kind(experts))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=dice) * 0.4)
        models.append(model.to(dtype))
    return zero3.shard(models[0], nn.Linear, policy=policy, process_group=group), models[1]


def sent_by(rank: int, dtype: torch.dtype, used: int, which: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of rank 1 one token, of others none."""
    count = int(rank == 1)
    dice = torch.Generator().manual_seed(3)
    x = torch.randn(1, H, generator=dice).to(dtype)[:count]
    return x, torch.full((count, used), which), torch.rand(1, used, generator=dice).to(dtype)[:count]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("used", [1, 3])
def test_a_single_row_travels(used: int, dtype: torch.dtype) -> None:
    """What came next to it in memory begins anywhere."""

    def body(group: Any) -> None:
        model, plain = lone(group, dtype=dtype)
        x, which, weights = sent_by(group.rank, dtype, used, 0)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        found, expected = model(ours, which, weights), plain(theirs, which, weights)
        torch.testing.assert_close(found, expected)
        (found.sum().backward(), expected.sum().backward())
        torch.testing.assert_close(ours.grad, theirs.grad)

    run_ranks(2, body)


def test_plain_arguments_reach_the_owner_and_tensors_are_refused() -> None:
    def body(group: Any) -> None:
        model, plain = lone(group, Scaled)
        inputs = sent_by(1, torch.float64, 2, 1)
        torch.testing.assert_close(model(*inputs, 3.0), plain(*inputs, 3.0))
        assert not torch.equal(model(*inputs, 3.0), plain(*inputs))
        with pytest.raises(ValueError, match=r"experts.*expert_parallel.*tensor \[1, 1\].*argument 4"):
            model(*inputs, torch.ones(1, 1))

    run_ranks(2, body)


@pytest.mark.parametrize("rows", [5, 4])
def test_a_buffer_with_a_row_for_each_expert_is_refused(rows: int) -> None:
    class Biased(Experts):
        def __init__(self, experts: int) -> None:
            super().__init__(experts)
            self.register_buffer("load", torch.zeros(rows))

    def body(group: Any) -> None:
        if rows == 5:
            with pytest.raises(ValueError, match=r"experts\.load' is a buffer \[5\] of 5 experts"):
                lone(group, Biased, 5)
        else:
            lone(group, Biased, 5)

    run_ranks(2, body)


def test_fewer_experts_than_ranks_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "zero3"):
        run_ranks(3, lambda group: lone(group, experts=3))
        assert not [each for each in caplog.records if "fewer experts" in each.message]
        run_ranks(3, lambda group: lone(group, experts=2))
    (record,) = [each for each in caplog.records if "fewer experts" in each.message]
    assert "'dp_shard'" not in record.message and '("dp_shard", "ep")' in record.message and "experts" in record.message


# -- policies by name, and layers by hand


def test_policies_by_name_are_asked_for_layers_alone() -> None:
    """Also without the option: a table of policies knows layers, and adapters may change what nobody deals."""

    def body(group: Any) -> None:
        for policy in (Policy(), HOME):
            model = made()
            table = {"": Policy(), "blocks.0": policy, "blocks.1": Policy()}  # pop: each is asked for once
            zero3.shard(model, [*model.blocks], policy=lambda name, module, table=table: table.pop(name), process_group=group)
            assert not table
            assert [isinstance(block.experts, zero3.Zero3Layer) for block in model.blocks] == [policy is HOME, False]

    run_ranks(2, body)


def test_adapters_of_gathered_experts_are_not_refused() -> None:
    class ParamWrapper(nn.Module):
        """What peft's target_parameters makes."""

        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.base_layer, self.parameter_name = module, "up"

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.base_layer(*args, **kwargs)

    def body(group: Any) -> None:
        for policy, refused in ((Policy(), False), (lambda name, module: Policy(), False), (HOME, True), (lambda name, module: HOME, True)):
            model = made()
            for block in model.blocks:
                block.experts = ParamWrapper(block.experts)
            if refused:
                with pytest.raises(ValueError, match=r"expert_parallel=True.*'up'.*target_parameters"):
                    zero3.shard(model, [*model.blocks], policy=policy, process_group=group)
            else:
                zero3.shard(model, [*model.blocks], policy=policy, process_group=group)

    run_ranks(2, body)


def test_a_policy_by_name_that_finds_no_experts_is_refused() -> None:
    def body(group: Any) -> None:
        model = made()
        with pytest.raises(ValueError, match="expert_parallel=True finds no experts"):
            zero3.shard(model, [*model.blocks], policy=lambda name, module: HOME if name == "" else Policy(), process_group=group)

    run_ranks(2, body)


def test_layers_are_wrapped_by_hand() -> None:
    def body(group: Any) -> None:
        training = Training(group, HOME)
        training.model = model = made()
        for number, block in enumerate(model.blocks):
            model.blocks[number] = zero3.Zero3Layer(block, policy=HOME, process_group=group)
        training.model = zero3.Zero3Layer(model, policy=HOME, process_group=group)
        training.optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(training.model), lr=0.02)
        training.train(2).check()
        assert zero3.report(training.model).experts == (6 if group.rank == 0 else 4, 10)

    run_ranks(2, body)


def test_a_refused_layer_is_as_it_was() -> None:
    def body(group: Any) -> None:
        model = made()
        before = dict(model.named_modules())
        with pytest.raises(ValueError, match="rank"):
            zero3.Zero3Layer(model, 7, policy=HOME, process_group=group)
        if group.rank:
            model.first.weight.requires_grad_(False)
        with pytest.raises(ValueError, match=r"ranks differ.*first\.weight"):
            zero3.Zero3Layer(model, policy=HOME, process_group=group)
        assert dict(model.named_modules()) == before
        assert not any(isinstance(each, zero3.Zero3Layer) for each in model.modules())

    run_ranks(2, body)


# -- optimizers of a rank's own experts


class Clipped(torch.optim.SGD):
    """By a norm of each whole parameter, as Adafactor does it; or of each expert's matrix."""

    def __init__(self, params: Any, lr: float = 0.1, by_expert: bool = False) -> None:
        super().__init__(params, lr)
        self.by_expert = by_expert

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    dims = tuple(range(1 if self.by_expert else 0, each.ndim))
                    each.grad = each.grad / each.grad.square().sum(dim=dims, keepdim=True).sqrt().clamp(min=1e-6)
        super().step()


@pytest.mark.parametrize(
    ("make", "fits"),
    [
        (torch.optim.AdamW, True), (lambda p: Clipped(p, by_expert=True), True), (Clipped, False),
        (lambda p: torch.optim.Adafactor(p, lr=0.01), False),
    ],
    ids=["AdamW", "by expert", "by parameter", "Adafactor"],
)  # fmt: skip
def test_check_optimizer_knows_that_a_rank_has_a_part_of_the_experts(make: Callable[[Any], Any], fits: bool) -> None:
    def body(group: Any) -> None:
        model, _ = lone(group)
        groups = zero3.param_groups(model, lambda name, info: {"whole": info.ndim == 3} if info.ndim == 3 else None)
        if fits:
            zero3.check_optimizer(model, make(groups))
        else:
            with pytest.raises(ValueError, match=r"over all experts.*expert_parallel"):
                zero3.check_optimizer(model, make(groups))

    run_ranks(2, body)


# -- the guard: calls in another order than the latest


class Failure(ArithmeticError):
    pass


def guarded(policy: Policy, order: str, checkpoints: str) -> Callable[[Any], None]:
    """Two calls in a guard with tokens of different numbers. The second micro-batch fails on one rank, at one place after the other."""

    def body(group: Any) -> None:
        training = Training(group, policy, prepare=lambda model: setattr(model, "checkpoints", checkpoints))

        def call(number: int, model: Any, rank: int) -> Tensor:
            return model(tokens(rank, number)).square().sum()

        def micro(model: Any, rank: int, fails: int | None) -> None:
            here = iter(range(10))

            def place() -> None:
                if next(here) == fails:
                    raise Failure

            if order == "no_grad":
                loss = call(1, model, rank)
                place()
                with torch.no_grad():
                    call(2, model, rank)
                place()
                loss.backward()
            else:
                losses = [call(1, model, rank), call(2, model, rank)]
                for loss in losses if order == "in order" else reversed(losses):
                    place()
                    loss.backward()

        for fails in (None, None, 0, 1, None):
            with zero3.step_guard(training.model) as ended:
                micro(training.model, group.rank, fails if group.rank == 1 else None)
            assert sorted(ended.errors) == ([] if fails is None else [1]), ended.errors
            if fails is None:
                for rank in range(group.world_size):
                    micro(Shared(training.plain, group.world_size), rank, None)
                training.step()
        training.check()
        for experts in states_of(training.model):
            assert not len(getattr(experts.behaviour.call, "_guarded", ()))

    return body


class Shared(nn.Module):
    """The model, whose loss is divided by the number of ranks."""

    def __init__(self, model: nn.Module, ranks: int) -> None:
        super().__init__()
        self.model, self.ranks = model, ranks

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) / self.ranks**0.5


@pytest.mark.parametrize("checkpoints", ["", "not reentrant", "reentrant"])
@pytest.mark.parametrize("order", ["no_grad", "in order", "latest first"])
def test_a_failed_rank_answers_with_the_rows_of_the_right_call(order: str, checkpoints: str) -> None:
    run_ranks(2, guarded(HOME, order, checkpoints))


def test_a_failed_rank_answers_in_the_dtype_of_the_others() -> None:
    """The micro-batch before had another one."""

    class Loose(Experts):
        def forward(self, x: Tensor, which: Tensor, how_much: Tensor) -> Tensor:
            return super().forward(x.float(), which, how_much.float()).to(x.dtype)

    def body(group: Any) -> None:
        model = made(dtype=torch.float32)
        for block in model.blocks:
            block.experts.__class__ = Loose
        zero3.shard(model, [*model.blocks], policy=HOME, process_group=group)
        for number, (dtype, fails) in enumerate(
            [(None, False), (None, False), (torch.bfloat16, False), (None, False), (torch.bfloat16, True)]
        ):
            hook = None
            if fails and group.rank == 1:
                hook = model.blocks[0].norm.register_forward_pre_hook(lambda *_: 1 / 0)
            with zero3.step_guard(model) as ended:
                hooks = [
                    block.experts.register_forward_pre_hook(
                        lambda m, args, kw, dtype=dtype: ((args[0] if dtype is None else args[0].to(dtype),), kw), with_kwargs=True
                    )
                    for block in model.blocks
                ]
                model(tokens(group.rank, number, torch.float32)).square().sum().backward()
            assert sorted(ended.errors) == ([1] if fails else []), ended.errors
            for each in (hook, *hooks):
                if each is not None:
                    each.remove()

    run_ranks(2, body)


# -- off


def test_off_nothing_of_it_is_there() -> None:
    def body(group: Any) -> None:
        calls = {}
        for policy in (Policy(), HOME):
            model = made()
            zero3.shard(model, [*model.blocks], policy=policy, process_group=group)
            model(tokens(group.rank, 1)).square().sum().backward()
            states = states_of(model)
            kinds = {type(state.behaviour.call).__module__ for state in states} | {type(c.at).__module__ for s in states for c in s.chunks}
            calls[policy] = (
                any(module.startswith("zero3.experts") for module in kinds),
                any(c.in_part for s in states for c in s.chunks),
                len(exchanges(states[0].log.entries)) > 0,
            )
        assert calls[Policy()] == (False, False, False)
        assert calls[HOME] == (True, True, True)

    run_ranks(2, body)
