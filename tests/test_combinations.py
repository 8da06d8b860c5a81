"""A run that uses everything at once, in any order: ranks are threads, and plain torch says what should come of it.

hypothesis draws a policy and what users do between and inside steps. ZERO3_EXAMPLES=2000 draws more, and others every time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import grad, vmap

import zero3
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn, assert_close, process_group
from tests.support.stacks import WIDTH, Block, Stack, built, loss_of, words_of
from zero3 import ParamInfo, ShardingPolicy

EXAMPLES = int(os.environ.get("ZERO3_EXAMPLES", "25"))
BLOCKS = 3


class Model(Stack):
    """With a method that reads a parameter of the root's own, and a tied head, or not."""

    def __init__(self, tied: bool) -> None:
        super().__init__(*[Block(6 + i) for i in range(BLOCKS)], tied=tied)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))

    def encode(self, words: Tensor) -> Tensor:
        return self.norm(self.through_blocks(self.embed(words))) * self.scale

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scale, 0.5, 1.0)


def made(tied: bool) -> Model:
    return built(lambda: Model(tied))


def left_alone(name: str, info: ParamInfo) -> bool:
    return name in ("norm.weight", "blocks.1.down.bias")


def chosen(seed: int) -> Callable[[str, ParamInfo], bool]:
    """Whole blocks, or single parameters; the scale always trains, so that an optimizer has something to do."""
    return lambda name, info: name == "scale" or bool((seed >> (len(name) % 5)) & 1) or f"blocks.{seed % 4}" in name


def options_of(name: str, info: ParamInfo) -> dict[str, Any]:
    return {"lr": 0.05 if info.ndim > 1 else 0.1, "whole": info.ndim == 2}


@dataclass(frozen=True)
class Run:
    world_size: int
    tied: bool
    from_meta: bool
    grouped: bool
    together: bool
    policy: ShardingPolicy
    actions: tuple[tuple[str, int], ...]


ACTIONS = ["micro-batch", "micro-batch", "kept micro-batch", "encode", "scale by name", "clip by name", "step", "step", "fetch", "release"]
MORE = ["set_trainable", "transform", "reduce", "evaluate", "report", "guarded micro-batch", "clip", "order", "load", "write"]


@st.composite
def runs(draw: Callable[[Any], Any]) -> Run:
    stage = draw(st.sampled_from([3, 3, 2, 1]))
    policy = ShardingPolicy(
        stage=stage,
        dynamic=draw(st.sampled_from([False, False, False, True])),
        reshard_after_forward=draw(st.booleans()),
        prefetch_depth=draw(st.integers(0, 2)),
        transactional=stage > 1 and draw(st.booleans()),
        ignored=draw(st.sampled_from([None, left_alone])),
        grad_dtype=draw(st.sampled_from([None, torch.float32])),
        gather_format=draw(
            st.sampled_from([None, None, zero3.Int8(block_size=1), zero3.Float8(block=(1, 1))])
        ),  # exact, but for a last bit
        reduce_format=draw(st.sampled_from([None, None, zero3.Int8(block_size=1)])),
    )
    actions = draw(st.lists(st.tuples(st.sampled_from([*ACTIONS, *MORE]), st.integers(0, 31)), min_size=3, max_size=14))
    tied, from_meta, grouped, together = (draw(st.booleans()) for _ in range(4))
    return Run(draw(st.sampled_from([1, 2, 3])), tied, from_meta, grouped and stage > 1, together, policy, tuple(actions))


def loss_by(model: Any, kind: str, turn: Turn) -> Tensor:
    return model.encode(words_of(turn)).pow(2).mean() if kind == "encode" else loss_of(model, turn)


def scaled(gradients: dict[str, Tensor]) -> None:
    for name, gradient in gradients.items():
        gradient.mul_(0.5 if name.endswith("bias") else 1.5)


def clipped(gradients: dict[str, Tensor]) -> None:
    for gradient in gradients.values():
        gradient.div_(1 + gradient.norm())


def layers_of(model: Model) -> list[Any]:
    """The ends are one layer, and two blocks another."""
    return [(model.embed, model.head), (model.blocks[0], model.blocks[2]), model.blocks[1]]


def transformed(model: Any, seed: int) -> Tensor:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return vmap(grad(lambda row: model.blocks[seed % BLOCKS](row).pow(2).sum()))(x)


def is_ignored(run: Run, name: str) -> bool:
    return run.policy.ignored is not None and left_alone(name, None)  # type: ignore[arg-type]


def plain_run(run: Run) -> list[Any]:
    """What each action shows."""
    model, shown = made(run.tied), list[Any]()
    if run.from_meta:
        torch.manual_seed(4)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    named = dict(model.named_parameters())

    def gradients() -> dict[str, Tensor]:
        return {n: p.grad for n, p in named.items() if p.grad is not None and not is_ignored(run, n)}

    for number, (action, seed) in enumerate(run.actions):
        if action in ("micro-batch", "kept micro-batch", "guarded micro-batch", "encode"):
            for rank in range(run.world_size):
                (loss_by(model, action, Turn(rank, number, run.world_size)) / run.world_size).backward()
        elif action == "scale by name":
            scaled(gradients())
        elif action == "clip by name":
            clipped(gradients())
        elif action == "clip":
            shown.append([torch.nn.utils.clip_grad_norm_([p for n, p in named.items() if n in gradients()], 0.5).double()])
        elif action == "write":
            model.blocks[seed % BLOCKS].down.weight.data.mul_(0.9)
        elif action == "step":
            for name, p in named.items():
                if p.grad is not None:
                    rate = 0.05 if p.ndim > 1 or not run.grouped else 0.1
                    p.data.sub_(p.grad, alpha=0.05 if is_ignored(run, name) else rate)
                    p.grad = None
        elif action == "set_trainable":
            for name, p in named.items():
                p.grad = None
                p.requires_grad_(is_ignored(run, name) or chosen(seed)(name, None))  # type: ignore[arg-type]
        elif action == "transform":
            shown.append([transformed(model, seed)])
        elif action == "evaluate":
            shown.append([loss_of(model, Turn(0, seed, 1)).detach()])
        shown.append({name: p.detach().clone() for name, p in named.items()})
    return shown


class Sharded:
    """The same on one rank of a sharded model."""

    def __init__(self, run: Run, model: Model, group: ThreadCommunicator) -> None:
        self.run, self.group = run, group
        layers = layers_of(model) if run.together else None
        self.model: Any = zero3.shard(model, layers, process_group=process_group(group), policy=run.policy, device="cpu")
        zero3.register_forward_method(self.model, "encode")
        if run.from_meta:
            zero3.materialize(self.model)
        self.make_optimizer()

    def own(self) -> list[nn.Parameter]:
        return [p for name, p in self.model.named_parameters() if "chunk" not in name]

    def make_optimizer(self) -> None:
        parameters: Any = zero3.param_groups(self.model, options_of) if self.run.grouped else zero3.get_trainable_chunk(self.model)
        self.optimizer = torch.optim.SGD(parameters, lr=0.05)

    def zero(self) -> None:
        self.optimizer.zero_grad()
        for parameter in self.own():
            parameter.grad = None

    def do(self, number: int, action: str, seed: int) -> list[Any]:
        model, shown = self.model, list[Any]()
        if action in ("micro-batch", "kept micro-batch", "encode"):
            with zero3.no_sync(model) if action == "kept micro-batch" else nullcontext():
                loss_by(model, action, Turn(self.group.rank, number, self.run.world_size)).backward()
        elif action == "guarded micro-batch":
            can_be = self.run.policy.stage == 3 and not self.run.policy.dynamic
            with zero3.step_guard(model) if can_be else nullcontext():
                loss_of(model, Turn(self.group.rank, number, self.run.world_size)).backward()
        elif action == "fetch":
            zero3.fetch(model if seed > 20 else model.blocks[seed % BLOCKS])
        elif action == "release":
            zero3.release(model if seed > 20 else model.blocks[seed % BLOCKS])
        elif action == "transform":
            with zero3.resident(model):
                shown.append([transformed(model, seed)])
        elif action == "evaluate":
            with zero3.resident(model) if seed % 2 else nullcontext(), torch.no_grad():
                shown.append([loss_of(model, Turn(0, seed, 1))])
        elif action == "order":
            ends = [layer for layer in (model.embed, model.head) if isinstance(layer, zero3.Zero3Layer)]
            zero3.set_forward_order(model, [*ends, *model.blocks] if seed % 2 else [*ends[:1], *model.blocks, *ends[1:]])
        elif action == "load":
            values = zero3.full_state_dict(model)
            with torch.no_grad():
                for chunk in zero3.get_trainable_chunk(model):
                    chunk.data.mul_(1.5)
            zero3.load_full_state_dict(model, values)
        elif action == "write":
            with zero3.full_params(model.blocks[seed % BLOCKS], writeback=True), torch.no_grad():
                model.blocks[seed % BLOCKS].down.weight.mul_(0.9)
        elif action == "report":
            assert zero3.report(model).world_size == self.run.world_size
        else:
            zero3.reduce_gradients(model)
            shown += self.with_gradients(action, seed)
        return [*shown, zero3.full_state_dict(model, rank0_only=False)]

    def with_gradients(self, action: str, seed: int) -> list[Any]:
        if action == "clip":
            return [[zero3.clip_grad_norm_(self.model, 0.5)]]
        if action == "scale by name":
            scaled(zero3.named_gradients(self.model))
        elif action == "clip by name":
            with zero3.full_gradients(self.model, writeback=True) as gradients:
                clipped(gradients)
        elif action == "step":
            for parameter in self.own():
                if parameter.grad is not None:
                    self.group.all_reduce(parameter.grad)
                    parameter.data.sub_(parameter.grad / self.run.world_size, alpha=0.05)
            self.optimizer.step()
            self.zero()
        elif action == "set_trainable":
            self.zero()
            zero3.set_trainable(self.model, chosen(seed))
            self.make_optimizer()
        return []


@settings(max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES == 25, suppress_health_check=list(HealthCheck))
@given(runs())
def test_everything_together(run: Run) -> None:
    with torch.random.fork_rng(devices=[]):
        expected = plain_run(run)
        if run.from_meta:
            with torch.device("meta"):
                models = [made(run.tied) for _ in range(run.world_size)]
        else:
            models = [made(run.tied) for _ in range(run.world_size)]
        torch.manual_seed(4)

        def body(group: ThreadCommunicator) -> list[Any]:
            sharded = Sharded(run, models[group.rank], group)
            return [each for number, (action, seed) in enumerate(run.actions) for each in sharded.do(number, action, seed)]

        chosen_by = (run.policy.grad_dtype, run.policy.gather_format, run.policy.reduce_format)
        tolerance = 1e-9 if chosen_by == (None, None, None) else 1e-4
        for found in run_ranks(run.world_size, body):
            assert len(found) == len(expected)
            for mine, theirs in zip(found, expected, strict=True):
                mine = {name: mine[name] for name in theirs} if isinstance(theirs, dict) else mine
                assert_close(mine, theirs, tolerance, str(replace(run)))
