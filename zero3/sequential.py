"""Zero3Sequential: layers one after another, each fetched while the one before it computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from .comm.agreement import Meets, Members, agreeing
from .comm.factory import any_device_of, communicator_for
from .core.runtime import ForwardPass, Runtime
from .guards.compiled import ends_graphs
from .layer import Zero3Layer, adopt, floating_dtype, layers_of, states_in
from .policy import unlike

__all__: list[str] = []


class Zero3Sequential(nn.Module):
    """Calls layers one after another, and gathers each layer's parameters while the layer before it
    computes.

    Parameters have the same names as in an `nn.Sequential` of the unwrapped modules (`0.weight`,
    ...). `len`, iteration and indexing give the layers.

    Args:
        modules: The layers in the order of their calls: at least one, all with the same process
            group and device.

    Raises:
        TypeError: An item is no `Zero3Layer`.
        ValueError: There are no items, items have different process groups or devices, or differ in
            a field of `ShardingPolicy` that counts for the whole model, or ranks have different
            numbers of layers.

    Example::

        model = zero3.Zero3Sequential([zero3.Zero3Layer(block) for block in blocks])
        model(batch).mean().backward()
    """

    def __init__(self, modules: Iterable[Zero3Layer]) -> None:
        super().__init__()
        layers = list(modules) if isinstance(modules, Iterable) else modules
        _check_items(layers)
        for index, layer in enumerate(layers):
            self.add_module(str(index), layer)
        self._layers = tuple(layers)

    @ends_graphs
    def forward(self, x: Any) -> Any:
        with ForwardPass(self._shared_runtime(), self):
            for layer in self._layers:
                x = layer(x)
            return x

    def _shared_runtime(self) -> Runtime:
        """The runtime that all layers share. It is made at the first call."""
        runtime = self._layers[0]._runtime
        if runtime is None or any(layer._runtime is not runtime for layer in self._layers):
            nested = len(layers_of(self)) > len(self._layers)
            runtime = adopt(self, ordered=not nested)
        return runtime

    def get_trainable_chunk(self) -> list[nn.Parameter]:
        """This rank's trainable chunks of all layers, in their order. They are the parameters for
        the optimizer.

        Returns:
            One 1-D tensor `[S]` for each dtype of each layer.
        """
        return [chunk for layer in layers_of(self) for chunk in layer._state.chunks.trainable()]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the first floating chunk is stored and updated. `report` tells the
        dtypes of compute.
        """
        return floating_dtype(self)

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[Zero3Layer]:
        return iter(self._layers)

    def __getitem__(self, index: int) -> Zero3Layer:
        return self._layers[index]


def _check_items(layers: Any) -> None:
    """Raises a TypeError or a ValueError on all ranks, if these can't be a model's layers."""
    given = layers if isinstance(layers, list) else []
    states = [layer._state for layer in given if isinstance(layer, Zero3Layer)]
    among: Meets
    if states:
        among, subject = states[0], f"a Zero3Sequential of {len(states)} layers"
    else:  # no group to tell the others by: most likely they use the default one
        device, subject = any_device_of(None), "a Zero3Sequential without layers"
        among = Members(communicator_for(None, device), device)
    with agreeing(among, subject, "Zero3Sequential") as lines:
        lines += [state.name_among_ranks for state in states]
        if not isinstance(layers, list):
            raise TypeError(
                f"modules must be an iterable of Zero3Layers, found {type(layers).__name__}"
            )
        if not layers:
            raise ValueError("modules is empty: Zero3Sequential needs at least one Zero3Layer")
        for index, layer in enumerate(layers):
            if not isinstance(layer, Zero3Layer):
                raise TypeError(
                    f"item {index} is a {type(layer).__name__}, expected a Zero3Layer: wrap it as "
                    "Zero3Layer(module)"
                )
        for index, state in enumerate(states):
            if not states[0].communicator.same_ranks(state.communicator):
                raise ValueError(
                    f"item {index} has another process group than item 0: all layers of a model "
                    "share one"
                )
            if state.device != states[0].device:
                raise ValueError(
                    f"item {index} is on {state.device}, item 0 on {states[0].device}: all layers "
                    "of a model share one device"
                )
        named = (
            (f"{state.label} in item {index}", state.policy)
            for index, layer in enumerate(layers)
            for state in states_in(layer)
        )
        if (error := unlike(named)) is not None:
            raise error
