"""How the values of a quantised parameter, or of a view of it, are made: when an operation needs
them, and again for its backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..quantized.codec import Codec
from ..quantized.formats import Format
from ..quantized.sections import QuantizedTensor, StoredRows

__all__: list[str] = []


@dataclass(eq=False)
class QuantizedWeight:
    """A parameter's bytes in its layer's full buffer, and what reads them."""

    format: Format
    shape: tuple[int, ...]
    own_dtype: torch.dtype  # that of the values in `full_params` and in state dicts
    dtype: torch.dtype  # in which the layer computes
    codec: Codec
    stretched: Tensor  # the parameter's data: a NaN, stretched to its shape
    rows: StoredRows
    shown_as: type[nn.Parameter]  # the parameter's class while the layer is fetched, to compute
    parameter: weakref.ref[nn.Parameter]
    # views of the full buffer, from its first fetch on; and its data then, of so many matrices
    stored: Sequence[QuantizedTensor] | None = None
    shown: Tensor | None = None

    def is_of(self, parameter: nn.Parameter) -> None:
        self.parameter = weakref.ref(parameter)

    def see(self, raw: Tensor | None) -> None:
        """`raw`: its bytes in the present full buffer, all rows or some."""
        self.stored, self.shown = None, None
        if raw is not None:
            self.stored = self.rows.seen(raw)
            some = len(self.stored) < self.rows.count
            self.shown = (
                self.stretched[: len(self.stored) * self.rows.per] if some else (self.stretched)
            )

    def values(
        self, stored: Sequence[QuantizedTensor], dtype: torch.dtype, matrix: int | None = None
    ) -> Tensor:
        """What rows stand for, or one matrix of them: then nothing else is decoded."""
        if matrix is not None:
            row, place = divmod(matrix, self.rows.per)
            return self.codec.dequantize(stored[row], dtype, place)
        if self.rows.count == 1:
            return self.codec.dequantize(stored[0], dtype)
        per, shape = self.rows.per, self.shape[1:]
        device = self.stretched.device
        found = torch.empty((len(stored) * per, *shape), dtype=dtype, device=device)
        for number, matrices in enumerate(stored):
            found[number * per : (number + 1) * per] = self.codec.dequantize(matrices, dtype)
        return found

    @property
    def format_name(self) -> str:
        return self.format.name

    @property
    def name(self) -> str:
        """For errors: "weight of layer '0' (Linear)"."""
        return getattr(self.parameter(), "zero3_name", "a parameter")

    def decoded(self, dtype: torch.dtype, matrix: int | None = None) -> Tensor:
        """The values, or those of one matrix of several, such as an expert's: then nothing else is
        decoded.
        """
        if self.stored is None or type(self.parameter()) is not self.shown_as:
            raise RuntimeError(
                f"{self.name} is released: what was made of it while its layer computed can't be "
                "used any more"
            )
        return self.values(self.stored, dtype, matrix)


class Operation(NamedTuple):
    """A view or a cast of a tensor, or one of several views that a function returns."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: int | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        made: Any = self.function(tensor, *self.args, **self.kwargs)
        found: Tensor = made if self.place is None else made[self.place]
        return found


@dataclass(frozen=True, slots=True)
class Recipe:
    """A weight, or one matrix of it, and what was done to it since."""

    weight: QuantizedWeight
    matrix: int | None = None
    steps: tuple[Operation, ...] = ()
    dtype: torch.dtype | None = None  # what it is cast to at last. None: no cast

    def then(self, step: Operation) -> Recipe:
        return replace(self, steps=(*self.steps, step))

    def one_matrix(self, index: int) -> Recipe | None:
        """The recipe of `tensor[index]`, if that is a matrix of the weight as it is."""
        shown = self.weight.shown
        count = 0 if shown is None else len(shown)
        plain = (
            len(self.weight.shape) == 3
            and self.matrix is None
            and not self.steps
            and -count <= index < count
        )
        return replace(self, matrix=index % count) if plain else None

    def values(self) -> Tensor:
        stored, wanted = self.weight.dtype, self.dtype or self.weight.dtype
        # Numbers are decoded in float32. If that is the weight's dtype, they may be rounded to the
        # other one at once.
        made = self.weight.decoded(
            wanted if stored == torch.float32 and not self.steps else stored, self.matrix
        )
        for step in self.steps:
            made = step(made)
        return made if self.dtype is None else made.to(self.dtype)


@dataclass(frozen=True, slots=True)
class Saved:
    """What a graph keeps in place of values, or of a view of them."""

    recipe: Recipe
    version: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor, recipe: Recipe) -> Saved:
        return cls(
            recipe,
            _version(recipe.weight),
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
        )

    def restored(self) -> Tensor:
        """
        Raises:
            RuntimeError: The weight was released or changed meanwhile. Torch raises the same for a
                tensor that it has saved.
        """
        weight = self.recipe.weight
        if (version := _version(weight)) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation, or released: {weight.name} is at version {version}; expected "
                f"version {self.version} instead"
            )
        with torch.no_grad():
            return self.recipe.values().as_strided(self.size, self.stride, self.offset)


def _version(weight: QuantizedWeight) -> int:
    parameter = weight.parameter()
    return -1 if parameter is None else parameter._version


@dataclass(eq=False)
class InUse:
    """The values that one operation computes with, and how they were made. It is emptied when the
    operation has computed.
    """

    made: list[tuple[Tensor, Recipe]] = field(default_factory=list)

    def add(self, recipe: Recipe) -> Tensor:
        with torch.no_grad():
            values = recipe.values()
        self.made.append((values, recipe))
        return values

    def pack(self, tensor: Tensor) -> Tensor | Saved:
        """Called by autograd for each tensor that the operation saves."""
        for values, recipe in self.made:
            base = values if values._base is None else values._base
            if tensor is values or tensor is base or tensor._base is base:
                return Saved.of(tensor, recipe)
        return tensor


def unpack(saved: Tensor | Saved) -> Tensor:
    return saved.restored() if isinstance(saved, Saved) else saved
