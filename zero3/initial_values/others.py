"""Tensors on the meta device that are in no chunk, and get their first values from rank 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..checkpoint.meta_buffers import put
from ..comm.communicator import is_first
from ..core.layer_state import LayerState
from ..modules import plain_modules

__all__: list[str] = []


class Others:
    """Tensors on the meta device that are in no chunk: buffers, mostly. Rank 0 draws them too, and
    sends them to all.
    """

    def __init__(self, model: nn.Module, states: Sequence[LayerState]) -> None:
        self._model, self._first = model, states[0]
        self._old = {id(tensor): tensor for _, _, tensor in self._places() if tensor.is_meta}
        # one of its places, in the twin; what stands there; its version
        self._lent: dict[int, tuple[nn.Module, str, Tensor, int]] = {}
        self._drawn: dict[int, Tensor] = {}
        self.bare: list[str] = []  # parameters that nothing has given values

    def _places(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        for module in plain_modules(self._model):
            for name, tensor in [*module._buffers.items(), *module._parameters.items()]:
                if tensor is not None:
                    yield module, name, tensor

    def lend(self, copies: Mapping[nn.Module, nn.Module]) -> None:
        for module, name, old in self._places():
            if module not in copies or not (old.is_meta or name in module._buffers):
                continue
            copy = copies[module]
            if not old.is_meta:  # its values may be read, and stay
                copy._buffers[name] = old.clone()
                continue
            known = self._lent.get(id(old))
            blank = torch.full_like(
                old,
                torch.nan if old.is_floating_point() else 0,
                device=self._first.device,
                requires_grad=False,
            )
            new = (
                known[2]
                if known is not None
                else nn.Parameter(blank, old.requires_grad)
                if isinstance(old, nn.Parameter)
                else blank
            )
            (copy._parameters if isinstance(old, nn.Parameter) else copy._buffers)[name] = new  # type: ignore[assignment]
            self._lent.setdefault(id(old), (copy, name, new, new._version))

    def take_back(self) -> None:
        for key, (copy, name, lent, version) in self._lent.items():
            now = (
                copy._parameters[name]
                if isinstance(lent, nn.Parameter)
                else copy._buffers.get(name)
            )
            if now is None or now.is_meta:
                continue
            if (
                now is not lent
                or now._version != version
                or (now.is_floating_point() and not now.isnan().any())
            ):
                self._drawn[key] = now.detach()
            elif isinstance(lent, nn.Parameter):
                self.bare.append(repr(name))

    @torch.no_grad()
    def spread(self) -> None:
        """Rank 0's values to all ranks."""
        communicator, device = self._first.communicator, self._first.device
        drawn = (
            communicator.exchange(bytes(key in self._drawn for key in self._old), device)[0]
            if self._old
            else b""
        )
        for (key, old), found in zip(self._old.items(), drawn, strict=True):
            if found:
                value = torch.empty_like(old, device=device, requires_grad=False)
                if is_first(communicator):
                    value.copy_(self._drawn[key])
                communicator.broadcast(value)
                put(self._model, old, value)
