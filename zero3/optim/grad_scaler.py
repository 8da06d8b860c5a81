"""Loss scaling whose steps are skipped by all ranks or by none."""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm.communicator import Communicator
from ..comm.errors import NamingFailures, Subject
from ..core.autograd import as_plain_tensors
from ..core.gradient_types import reduce_deferred

__all__: list[str] = []


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for sharded models: an inf or nan that one rank finds makes every rank skip the step.

        scaler = zero3.GradScaler("cuda")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    It takes chunks, and what `zero3.param_groups` puts in their place, and plain parameters beside them. One all-reduce of
    one number per optimizer and step, on every rank, also on those that have no parameter in the optimizer. As torch's it
    makes no other use of the host than to read whether to skip.

    Args:
        device: the type of the device that computes, "cuda" or "cpu".
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as for `torch.amp.GradScaler`.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        reduce_deferred(parameter.grad for group in optimizer.param_groups for parameter in group["params"])
        with as_plain_tensors():  # chunks' gradients would begin a reduction of their own
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        agreed = found_inf
        for other in found.values():
            agreed = torch.maximum(agreed, other.to(agreed.device))
        for communicator in _communicators(optimizer):
            with NamingFailures(communicator, "comparing", Subject("whether the gradients are finite")):
                communicator.all_reduce(agreed, maximum=True)
        return {device: agreed.to(device) for device in [*found, agreed.device]}


def _communicators(optimizer: torch.optim.Optimizer) -> list[Communicator]:
    """Of all parameters that know their layer, once each: most often one."""
    found: list[Communicator] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            owner = getattr(parameter, "zero3_state", None)
            state = owner() if owner is not None else None
            if state is not None and not any(known.same_ranks(state.communicator) for known in found):
                found.append(state.communicator)
    return found
