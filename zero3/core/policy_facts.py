"""What follows from a policy: for the code that carries it out, not for users."""

from __future__ import annotations

import torch

from ..policy import ShardingPolicy

__all__: list[str] = []


def shards_parameters(policy: ShardingPolicy) -> bool:
    """Whether a layer's full parameters are given back between its computations."""
    return policy.stage == 3


def shards_gradients(policy: ShardingPolicy) -> bool:
    """Whether each backward reduces gradients to chunks."""
    return policy.stage > 1


def keeps_until_backward(policy: ShardingPolicy) -> bool:
    """Whether full parameters stay between a layer's forward and its backward."""
    return not policy.reshard_after_forward or not shards_parameters(policy)


def compute_dtype(policy: ShardingPolicy, stored: torch.dtype) -> torch.dtype:
    """The dtype of a full buffer whose chunk is stored in `stored`."""
    return policy.param_dtype if policy.param_dtype is not None and stored.is_floating_point else stored


def gradient_dtype(policy: ShardingPolicy, stored: torch.dtype) -> torch.dtype:
    """The dtype of the full gradient of a chunk that is stored in `stored`, and of its reduction."""
    return policy.reduce_dtype if policy.reduce_dtype is not None and stored.is_floating_point else compute_dtype(policy, stored)
