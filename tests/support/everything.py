"""Runs that use everything at once: how they are drawn, and what plain torch says should come of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

import zero3
from tests.support.reference import Turn
from tests.support.stacks import WIDTH, Block, Stack, built, loss_of, words_of
from zero3 import ParamInfo, ShardingPolicy

BLOCKS = 3


class Featured(Block):
    """Has another method than `forward`."""

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x)) * self.down.bias[0]


class Model(Stack):
    """With a method that reads a parameter of the root's own, and a tied head, or not. It asks for the class of its blocks."""

    def __init__(self, tied: bool, reentrant: bool | None) -> None:
        super().__init__(*[Featured(6 + i) for i in range(BLOCKS)], tied=tied)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))
        self.reentrant = reentrant  # None: blocks are not recomputed

    def through_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            assert isinstance(block, Featured)
            if self.reentrant is None or not torch.is_grad_enabled():
                x = block(x)
            else:  # reentrant checkpointing needs gradients of its inputs
                x = checkpoint(block, x if x.requires_grad else x.requires_grad_(), use_reentrant=self.reentrant)
        return x

    def encode(self, words: Tensor) -> Tensor:
        return self.norm(self.through_blocks(self.embed(words))) * self.scale

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scale, 0.5, 1.0)


def made(run: Run) -> Model:
    return built(lambda: Model(run.tied, run.reentrant))


def drawn(module: nn.Module) -> None:
    """What `materialize` may be given."""
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter, 0.3, 0.2)


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
    drawn: bool
    compiled: bool
    reentrant: bool | None
    grouped: bool
    together: bool
    policy: ShardingPolicy
    actions: tuple[tuple[str, int], ...]


ACTIONS = [
    "micro-batch", "micro-batch", "kept micro-batch", "guarded micro-batch", "offloaded micro-batch", "encode", "features", "step", "step",
    "scale by name", "clip by name", "clip", "set_trainable", "transform", "evaluate", "fetch", "release", "order", "reduce", "report",
    "load", "checkpoint", "write",
]  # fmt: skip


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
        resident_bytes=draw(st.sampled_from([0, 2000])),
        gather_format=draw(
            st.sampled_from([None, None, zero3.Int8(block_size=1), zero3.Float8(block=(1, 1))])
        ),  # exact, but for a last bit
        reduce_format=draw(st.sampled_from([None, None, zero3.Int8(block_size=1)])),
    )
    actions = draw(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 31)), min_size=3, max_size=14))
    tied, from_meta, given, grouped, together = (draw(st.booleans()) for _ in range(5))
    compiled, reentrant = (
        draw(st.sampled_from([False] * 7 + [True])),
        draw(st.sampled_from([None, None, False] if policy.dynamic else [None, None, False, True])),
    )
    return Run(
        draw(st.sampled_from([1, 2, 3])),
        tied,
        from_meta,
        given,
        compiled,
        reentrant,
        grouped and stage > 1,
        together,
        policy,
        tuple(actions),
    )


def loss_by(model: Any, kind: str, turn: Turn, seed: int) -> Tensor:
    if kind == "features":
        return model.blocks[seed % BLOCKS].features(model.embed(words_of(turn))).pow(2).mean()
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
    model, shown = made(run), list[Any]()
    if run.from_meta:
        torch.manual_seed(4)
        for module in model.modules() if not run.drawn else ():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        if run.drawn:
            model.apply(drawn)
    named = dict(model.named_parameters())

    def gradients() -> dict[str, Tensor]:
        return {n: p.grad for n, p in named.items() if p.grad is not None and not is_ignored(run, n)}

    for number, (action, seed) in enumerate(run.actions):
        if action.endswith("micro-batch") or action in ("encode", "features"):
            for rank in range(run.world_size):
                loss = loss_by(model, action, Turn(rank, number, run.world_size), seed) / run.world_size
                if loss.requires_grad:  # of features of a frozen block it does not
                    loss.backward()
        elif action == "scale by name":
            scaled(gradients())
        elif action == "clip by name":
            clipped(gradients())
        elif action == "clip":
            shown.append([torch.nn.utils.clip_grad_norm_(named.values(), 0.5).double()])
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
