"""Facts that follow from a policy. They are not part of the public class."""

from __future__ import annotations

import os
from typing import Literal

import torch

from ..policy import ShardingPolicy

__all__: list[str] = []


def shards_parameters(policy: ShardingPolicy) -> bool:
    """Whether a layer's full parameters are released between its computations."""
    return policy.stage == 3


def shards_gradients(policy: ShardingPolicy) -> bool:
    """Whether each backward reduces gradients into chunks."""
    return policy.stage > 1


def keeps_until_backward(policy: ShardingPolicy) -> bool:
    """Whether full parameters stay between a layer's forward and its backward."""
    return not policy.reshard_after_forward or not shards_parameters(policy)


def compute_dtype(policy: ShardingPolicy, stored: torch.dtype) -> torch.dtype:
    """The dtype of the full buffer for a chunk of dtype `stored`."""
    return policy.param_dtype if policy.param_dtype is not None and stored.is_floating_point else stored


def gradient_dtype(policy: ShardingPolicy, stored: torch.dtype) -> torch.dtype:
    """The dtype of the full gradient, and of its reduction, for a chunk of dtype `stored`."""
    return policy.reduce_dtype if policy.reduce_dtype is not None and stored.is_floating_point else compute_dtype(policy, stored)


def gradient_itemsize(policy: ShardingPolicy, stored: torch.dtype) -> int:
    """The bytes of an element of the gradient `[S]` of a chunk of dtype `stored`, and of the wider sum that is kept beside it."""
    lands, reduced = landed_dtype(policy, stored).itemsize, gradient_dtype(policy, stored).itemsize
    return lands + reduced * (reduced > lands)


def rests_in(policy: ShardingPolicy) -> Literal["device", "cpu", "disk"]:
    """Where chunks rest."""
    return "device" if policy.offload is None else "cpu" if policy.offload == "cpu" else "disk"


def directory_of(policy: ShardingPolicy) -> str | None:
    """The directory in whose files chunks rest."""
    return os.fspath(policy.offload) if policy.offload is not None and policy.offload != "cpu" else None


def landed_dtype(policy: ShardingPolicy, stored: torch.dtype) -> torch.dtype:
    """The dtype of the gradient `[S]` of a chunk of dtype `stored`."""
    return policy.grad_dtype if policy.grad_dtype is not None and stored.is_floating_point else stored
