"""A parameter's places in its modules: how it is shown there while its layer is fetched, and hidden
while it is not. Its face says what it is in a full buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .autograd import as_plain_tensors
from .flat import unpack
from .layout import ChunkLayout
from .released import ReleasedParameter

__all__: list[str] = []


class Face(Protocol):
    """What a chunk's parameters are in its full buffer."""

    name: str | None  # what reports call the numbers. None: by their dtype
    read_only: bool  # whether values can't be written, only loaded
    own: torch.dtype | None  # the parameters' dtype in the model. None: that of the chunk

    # -- one parameter

    def stored(self, sites: ParameterSites) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and the dtype of the parameter's slot."""
        ...

    def store(self, sites: ParameterSites, device: torch.device) -> Tensor:
        """What is written into the slot, before the parameter is hidden for the first time. The
        layer is on `device`.
        """
        ...

    def value(self, sites: ParameterSites, slot: Tensor) -> Tensor:
        """The parameter's values, from what its slot in a full buffer holds."""
        ...

    def put(self, sites: ParameterSites, values: Tensor, slot: Tensor) -> None:
        """Puts values, in the parameter's shape, into its slot in a full buffer."""
        ...

    def stand_in(self, sites: ParameterSites, blank: Tensor) -> Tensor:
        """The parameter's data while it is released: the 0-dim `blank`, stretched to its shape."""
        ...

    # -- a chunk's parameters, in the order of its slots

    def views(self, full: Tensor, layout: ChunkLayout) -> Sequence[Tensor]:
        """The data of parameters that are shown while the layer computes, when `full` is the
        buffer.
        """
        ...

    def values(self, full: Tensor, layout: ChunkLayout) -> Sequence[Tensor]:
        """Their values, when `full` is filled."""
        ...

    def write(self, values: Sequence[Tensor], full: Tensor, layout: ChunkLayout) -> None:
        """Puts values into `full`."""
        ...

    def forget(self) -> None:
        """Nobody needs the buffer any more that it was shown last."""
        ...

    # -- only where `ParameterSites.known` is not None

    def know(self, sites: ParameterSites) -> None:
        """The parameter is another object now."""
        ...

    def shown_as(self, sites: ParameterSites, value: Tensor) -> type[nn.Parameter]:
        """The class of a parameter that is shown with `value` as its data."""
        ...


class Views:
    """Parameters are views of the full buffer: nothing is copied. `stored_in`: the dtype of the
    chunk, if that is not their `own`.
    """

    name: str | None = None
    read_only = False

    def __init__(
        self, own: torch.dtype | None = None, stored_in: torch.dtype | None = None
    ) -> None:
        self.own, self._stored_in = own, stored_in

    def stored(self, sites: ParameterSites) -> tuple[tuple[int, ...], torch.dtype]:
        return tuple(sites.parameter.shape), self._stored_in or sites.parameter.dtype

    def store(self, sites: ParameterSites, device: torch.device) -> Tensor:
        return sites.parameter.to(self._stored_in or sites.parameter.dtype)

    def value(self, sites: ParameterSites, slot: Tensor) -> Tensor:
        return slot

    def put(self, sites: ParameterSites, values: Tensor, slot: Tensor) -> None:
        if values.data_ptr() != slot.data_ptr():
            slot.copy_(values)

    def stand_in(self, sites: ParameterSites, blank: Tensor) -> Tensor:
        return blank.expand(sites.parameter.shape)

    def views(self, full: Tensor, layout: ChunkLayout) -> Sequence[Tensor]:
        return unpack(full, layout)

    values = views

    def write(self, values: Sequence[Tensor], full: Tensor, layout: ChunkLayout) -> None:
        return None  # they are views of it

    def forget(self) -> None:
        return None

    def know(self, sites: ParameterSites) -> None:
        return None

    def shown_as(self, sites: ParameterSites, value: Tensor) -> type[nn.Parameter]:
        return nn.Parameter


@dataclass(eq=False)
class ParameterSites:
    """One parameter, and all places in the layer's modules that have it. A tied parameter has
    several places.
    """

    name: str
    parameter: nn.Parameter
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    face: Face = field(default_factory=Views)
    known: Any = None  # what its face knows of it

    def show(self, value: Tensor) -> None:
        """Makes the parameter an ordinary one, or what its face says, whose data is `value`, its
        slot of the full buffer. Nothing is copied.
        """
        self.parameter.__class__ = nn.Parameter
        self.parameter.data = value
        for module, attribute in self.places:
            module.__dict__.pop(attribute, None)
            module._parameters[attribute] = self.parameter
        if self.known is not None:
            self.parameter.__class__ = self.face.shown_as(self, value)

    def hide(self, stand_in: Tensor) -> None:
        """[release 1] Makes the parameter a released one: metadata can be read, values raise,
        `model.parameters()` leaves it out.

        It may be called again on a hidden parameter.
        """
        self.parameter.__class__ = nn.Parameter
        self.parameter.grad = None
        self.parameter.data = stand_in
        for module, attribute in self.places:
            module._parameters.pop(attribute, None)
            module.__dict__[attribute] = self.parameter
        self.parameter.__class__ = ReleasedParameter

    def hide_put_back(self) -> None:
        """Hides the released parameter where another object stood, and it was put back since. Then
        the module lists it.
        """
        if any(module._parameters.get(name) is self.parameter for module, name in self.places):
            self.hide(self.data())

    def data(self) -> Tensor:
        """The parameter's data."""
        with as_plain_tensors():
            return self.parameter.data

    def replaced(self) -> bool:
        """Whether a module has another object in the place of this parameter. Only for a shown
        parameter.
        """
        return any(
            module._parameters.get(attribute) is not self.parameter
            for module, attribute in self.places
        )

    def replace(self, parameter: nn.Parameter) -> None:
        """Puts a new object into all places. A parameter that can't be given other data needs it:
        see `autograd.can_show`.
        """
        # attributes that users set, such as no_weight_decay
        parameter.__dict__.update(self.parameter.__dict__)
        put_into(self.places, parameter)
        self.parameter = parameter
        if self.known is not None:
            self.face.know(self)

    def take_face(self, face: Face, known: Any) -> None:
        """Gives it another face, before it is hidden for the first time."""
        self.face, self.known = face, known
        face.know(self)


def put_into(places: Iterable[tuple[nn.Module, str]], tensor: Tensor) -> None:
    """Puts a parameter or a buffer into modules."""
    for module, attribute in places:
        # not into _parameters: some modules keep lists of their own (LSTM)
        setattr(module, attribute, tensor)


def become(held: Any, kind: type) -> None:
    """An object that others hold is of another class from now on: it stays the same object."""
    held.__class__ = kind
