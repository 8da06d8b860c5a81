"""GradScaler: loss scaling in which all ranks skip a step together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..comm.errors import NamingFailures, Subject
from ..core.autograd import as_plain_tensors
from ..core.chunk_gradient import reduce_deferred
from ..core.collectives import Use
from ..core.layer_state import LayerState
from ..guards.marks import ignored_by, state_of
from ..stores.untouched import touch
from .several import held_by

__all__: list[str] = []


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for sharded models: an inf or nan on one rank makes every rank skip
    the step.

    Its optimizers may hold chunks, the parts that `param_groups` makes, and plain parameters. A
    step makes one all-reduce of one number for each optimizer, on every rank, also on ranks that
    have no parameter in it. An optimizer of plain parameters alone makes none: average their
    gradients before (as DDP does), or each rank decides by its own, and scales come apart.

    Args:
        device: The type of the device that computes: "cuda" or "cpu".
        init_scale: As for `torch.amp.GradScaler`.
        growth_factor: As for `torch.amp.GradScaler`.
        backoff_factor: As for `torch.amp.GradScaler`.
        growth_interval: As for `torch.amp.GradScaler`.
        enabled: As for `torch.amp.GradScaler`.

    Raises:
        RuntimeError: The all-reduce failed, in `unscale_` or `step`.

    Example::

        scaler = zero3.GradScaler(device.type)
        scaler.scale(loss_of(model, batch)).backward()
        scaler.unscale_(optimizer)
        zero3.clip_grad_norm_(model, 1.0)
        scaler.step(optimizer)
        scaler.update()
    """

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        layers = _one_layer_of_each_group(optimizer)
        for state in layers:
            state.conductor.conduct(Use(state, "GradScaler"))
        gradients = [parameter.grad for parameter in held_by(optimizer)]
        reduce_deferred(gradients)
        touch(gradients)
        # To gradients on the host torch would copy both without waiting for the copies.
        scale, none = (
            each.cpu() if self._from_afar(optimizer) else each for each in (inv_scale, found_inf)
        )
        with as_plain_tensors():  # an operation on a deferred gradient would begin its reduction
            found = super()._unscale_grads_(optimizer, scale, none, allow_fp16)
        agreed = found_inf
        for other in found.values():
            agreed = torch.maximum(agreed, other.to(agreed.device))
        for state in layers:
            state.log.look()
            what = Subject("whether the gradients are finite")
            with NamingFailures(state.communicator, "comparing", what, "GradScaler.step"):
                state.communicator.all_reduce(agreed, maximum=True)
        return {device: agreed.to(device) for device in [*found, agreed.device]}

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Steps, unless any rank has found inf or nan: see `torch.amp.GradScaler.step`.

        Args:
            optimizer: The optimizer.
            *args: For the optimizer's step.
            **kwargs: For the optimizer's step.

        Returns:
            What the optimizer's step returned; None if it was skipped.
        """
        own = getattr(optimizer, "_step_supports_amp_scaling", False)
        if not own or not self._from_afar(optimizer):
            return super().step(optimizer, *args, **kwargs)
        # Else it would read copies that have not come yet.
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            optimizer._step_supports_amp_scaling = own  # type: ignore[attr-defined]

    def _from_afar(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the scale is on an accelerator, and gradients are on the host (`offload`)."""
        return self._device != "cpu" and any(
            p.grad is not None and p.grad.device.type == "cpu" for p in held_by(optimizer)
        )


def _one_layer_of_each_group(optimizer: torch.optim.Optimizer) -> list[LayerState]:
    """A layer of each process group that shares some of the optimizer's parameters."""
    found: list[LayerState] = []
    for parameter in held_by(optimizer):
        state = state_of(parameter) or ignored_by(parameter)
        if state is not None and not any(
            known.communicator.same_ranks(state.communicator) for known in found
        ):
            found.append(state)
    return found
