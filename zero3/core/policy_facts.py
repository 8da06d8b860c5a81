"""Facts that follow from a policy. They are not part of the public class."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Literal

import torch

from ..comm.communicator import Communicator
from ..policy import ShardingPolicy
from ..quantized.formats import Format

__all__: list[str] = []

# The fields that say what a whole model does. All its layers have the same.
OF_THE_MODEL = (
    "dynamic", "gradient_reduction", "prefetch_depth", "separate_backup_group", "transactional", "compare_every", "resident_bytes",
)  # fmt: skip


def unlike(policies: Iterable[tuple[str, ShardingPolicy]]) -> ValueError | None:
    """The error if layers, each given by its name, differ in a field that counts for the whole model. They are compared to the first."""
    (first, counts), *others = policies
    for name, policy in others:
        for field in OF_THE_MODEL:
            if getattr(policy, field) != getattr(counts, field):
                return ValueError(
                    f"{name} has {field}={getattr(policy, field)!r}, and {first} has {field}={getattr(counts, field)!r}. It counts for "
                    "the whole model, so give all layers (under zero3.shard also the root, whose name is '') policies with the same"
                )
    return None


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
    lands, added = landed_dtype(policy, stored), added_dtype(policy, stored)
    return lands.itemsize + added.itemsize * (added != lands)


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


def added_dtype(policy: ShardingPolicy, stored: torch.dtype) -> torch.dtype:
    """The dtype in which the gradients of several backwards are added up: that in which they land, or the wider one they come in."""
    in_format = policy.reduce_format is not None and stored.is_floating_point  # such gradients are summed in float32
    reduced, lands = torch.float32 if in_format else gradient_dtype(policy, stored), landed_dtype(policy, stored)
    return reduced if reduced.itemsize > lands.itemsize else lands
