"""What integrations do to a model before it is sharded, and with which policy and layers they shard
it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ..access import states_of
from ..auto_wrap import Layers, choose, embeddings_of
from ..comm.agreement import agreeing
from ..comm.communicator import is_first
from ..comm.factory import communicator_for, mesh_of_parts
from ..core.layer_state import LayerState, ignored_of
from ..guards.module_overrides import Override
from ..layer import Zero3Layer, enter_root, layers_of, run_sharded
from ..modules import named
from ..policy import ShardingPolicy
from ..shard import PolicyOf, logging_only, shard
from ..towers.choosing import Optional
from .alike import all_ranks

__all__: list[str] = []

_LOW = MappingProxyType({"bf16": torch.bfloat16, "fp16": torch.float16})
Policy = ShardingPolicy | PolicyOf | None


def policy_and_masters(
    model: nn.Module, policy: Policy, mixed_precision: str
) -> ShardingPolicy | PolicyOf:
    """Returns the `policy` that was given. None: the one for accelerate's `mixed_precision`, low to
    compute, float32 to add up and keep; weights that train are made float32 for it.
    """
    if policy is not None:
        return policy
    low = _LOW.get(mixed_precision)
    if low is None:
        return ShardingPolicy()
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    return ShardingPolicy(param_dtype=low, reduce_dtype=torch.float32, output_dtype=torch.float32)


@dataclass(frozen=True)
class Sharding:
    """How an integration shards models. What is not explained here is as for `shard`."""

    policy: Policy = None  # None: what mixed precision asks for, with float32 masters
    layers: Layers = None
    optional: Optional = None
    # the output head is no layer, for callers that read its weight outside of its forward
    head_in_root: bool = False
    parts: int = 1  # the ranks that hold parts of the same sequences

    def shard(self, model: nn.Module, device: torch.device, mixed_precision: str) -> None:
        """Shards `model` as `zero3.shard` does.

        Raises:
            ValueError: The model has no values, its ranks can't share sequences, or `shard` does
                not know what to make layers of. It names `shard`.
        """
        _refuse_without_values(model, device)
        policy = policy_and_masters(model, self.policy, mixed_precision)
        try:
            with logging_only(self._tells):
                layers = _without_head(model, self.layers) if self.head_in_root else self.layers
                mesh = mesh_of_parts(self.parts, device) if self.parts != 1 else None
                shard(
                    model,
                    layers,
                    optional=self.optional,
                    device=device,
                    policy=policy,
                    process_group=mesh,
                )
        except ValueError as error:
            raise ValueError(
                f"{error}. To choose layers or a policy yourself, call zero3.shard(model, ...) "
                "first, and pass its result"
            ) from error

    def _tells(self, record: logging.LogRecord) -> bool:
        """Not that the head be taken out of the root's own layer, where it has to be."""
        return not self.head_in_root or "the root's own layer holds" not in str(record.msg)


def refuse_ignored(model: nn.Module) -> None:
    """Raises a ValueError on every rank if the policy leaves parameters alone that train: nobody
    would average their gradients, nor save their optimizer's state.
    """
    states = states_of(model)
    alone = {id(each.parameter) for each in ignored_of(states)}
    if not alone:  # on all ranks or on none: they have compared their policies
        return
    left = ((name, each) for name, each in model.named_parameters() if id(each) in alone)
    trained = [name for name, parameter in left if parameter.requires_grad]
    first, what = states[0], "whether ignored parameters train"
    with agreeing(first, what):
        if trained:
            raise ValueError(
                f"ShardingPolicy(ignored=...) leaves {len(trained)} parameters alone that train: "
                f"{named(trained, 3)}. Nobody would average "
                "their gradients over ranks. Freeze them (requires_grad_(False)), leave out "
                "`ignored`, or write the loop yourself, with zero3.shard"
            )


def computes_in_low_precision(model: nn.Module) -> bool:
    """Whether the policy says in which dtype it computes: autocast would be a second opinion."""
    return any(state.policy.param_dtype is not None for state in states_of(model))


def enclose_forward(model: nn.Module) -> None:
    """For a forward that was put over a sharded model's, as TRL does: it enters the model first,
    and the head with its `fused_lm_head`.

    It does nothing where the forward was put there before the model was sharded.
    """
    asked: Any = getattr(model, "get_base_model", None)
    base: nn.Module = asked() if callable(asked) and hasattr(model, "peft_config") else model
    root, runtime = vars(model).get("_zero3_root"), layers_of(model)[0]._runtime
    if isinstance(vars(base).get("forward", root), Override | LayerState):
        return
    Override(base, "forward", _with_head)
    if isinstance(root, LayerState) and runtime is not None:
        enter_root(base, root, runtime)


def _with_head(model: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The head is fetched around all of it, for its weight is read outside of its own forward."""
    head = embeddings_of(model, "output")
    if not kwargs.get("fused_lm_head") or not isinstance(head, Zero3Layer) or head._runtime is None:
        return forward(*args, **kwargs)
    return run_sharded(head._runtime, head._state, model, forward, args, kwargs)


def _without_head(model: nn.Module, layers: Layers) -> Layers:
    head = embeddings_of(model, "output")
    inside = {id(module) for module in head.modules()} if head is not None else set()
    kept = (
        tuple(each.module for each in chosen if id(each.module) not in inside)
        for chosen in choose(model, layers)
    )
    return [modules for modules in kept if modules]


def _refuse_without_values(model: nn.Module, device: torch.device) -> None:
    """Rank 0's values count, so other ranks may have none."""
    with all_ranks(device, "whether the model has values"):
        empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        if empty and is_first(communicator_for(None, device)):
            raise ValueError(
                f"this {type(model).__name__} has no values "
                f"({named(empty, 3)} on the meta device), and "
                "training would begin from nothing. Shard it first (zero3.shard), fill it with "
                "zero3.load_pretrained(model, directory) or zero3.materialize(model), and pass it "
                "then"
            )
