"""Facts that follow from a policy. They are not part of the public class."""

from __future__ import annotations

import os
from typing import Literal

import torch

from ..comm.communicator import Communicator
from ..policy import ShardingPolicy
from ..quantized.formats import Format

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


def gather_format(policy: ShardingPolicy, communicator: Communicator, stored: torch.dtype) -> Format | None:
    """The format in which a chunk of dtype `stored` is gathered while it trains. None: as it is, or cast. One rank alone sends nothing."""
    return policy.gather_format if communicator.shards > 1 and stored.is_floating_point else None


def rounding(policy: ShardingPolicy) -> str:
    """For errors: what makes that which computes other than the chunks."""
    chosen = {"param_dtype": policy.param_dtype, "gather_format": policy.gather_format}
    return " and ".join(f"{name}={value}" for name, value in chosen.items() if value is not None)


def reduce_format(policy: ShardingPolicy, communicator: Communicator, stored: torch.dtype) -> Format | None:
    """The format in which the gradients of a chunk of dtype `stored` are sent. None: as they are."""
    return policy.reduce_format if communicator.shards > 1 and stored.is_floating_point else None


def landed_dtype(policy: ShardingPolicy, stored: torch.dtype) -> torch.dtype:
    """The dtype of the gradient `[S]` of a chunk of dtype `stored`."""
    return policy.grad_dtype if policy.grad_dtype is not None and stored.is_floating_point else stored
