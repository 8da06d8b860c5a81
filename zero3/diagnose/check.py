"""check(): runs one training step with and without sharding, and compares the results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..access import full_params, get_trainable_chunk, is_sharded, states_of
from ..casting import cast
from ..comm.agreement import agreeing
from ..comm.streams import random_state_kept
from ..core.layer_state import LayerState, ignored_of
from ..core.parameters import ShardedParameter
from ..layer import state_behind
from ..optim.gradients import full_gradients
from ..policy import ShardingPolicy, compute_dtype, dtypes_at_the_edges, gradient_dtype
from ..shard import shard
from ..tables import table

__all__: list[str] = []

# tolerances for float64, float32 and narrower dtypes
_OF_DOUBLE, _OF_SINGLE, _OF_HALF = 1e-9, 1e-3, 5e-2


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the same in the sharded and in the unsharded run.

    Attributes:
        name: The parameter's name in the unwrapped model; "" for the loss.
        what: "loss", "gradient" or "value after the step".
        largest: The largest difference of an element; nan where one of the two is nan and the other
            is not.
        scale: The largest absolute value of the unsharded tensor, without infinities.
    """

    name: str
    what: str
    largest: float
    scale: float


@dataclass(frozen=True)
class CheckReport:
    """What `check` found. It is the same on every rank, except for the loss. `str(report)` tells it
    in words.

    Attributes:
        differences: The differences beyond the tolerance: the loss first, then in the order of the
            model's parameters.
        compared: How many tensors were compared.
        worst: The largest difference of a tensor, relative to its scale.
    """

    differences: list[Difference]
    compared: int
    worst: float

    @property
    def first(self) -> str | None:
        """The name of the first parameter that differs ("" is the loss), or None."""
        return self.differences[0].name if self.differences else None

    def __str__(self) -> str:
        lines = [f"  {what} {name}: {off}, {scale}" for what, name, off, scale in self._rows()]
        return "\n".join([self._verdict() + ":" * bool(lines), *lines, *self._more()])

    def _repr_html_(self) -> str:
        return table(self._verdict(), self._rows(), notes=self._more())

    def _verdict(self) -> str:
        if not self.differences:
            return (
                f"sharded and unsharded agree: {self.compared} tensors, at most "
                f"{self.worst:.1e} of each one's largest value apart"
            )
        return f"sharded and unsharded differ in {len(self.differences)} of {self.compared} tensors"

    def _rows(self) -> list[tuple[str, str, str, str]]:
        return [
            (d.what, d.name, f"off by {d.largest:.3g}", f"largest value {d.scale:.3g}")
            for d in self.differences[:10]
        ]

    def _more(self) -> list[str]:
        left = len(self.differences) - 10
        return [f"  and {left} more"] if left > 0 else []


def check(
    model: nn.Module,
    batch: Any,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    *,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
    policy: ShardingPolicy = ShardingPolicy(),  # noqa: B008 (frozen)
    process_group: Any = None,
    tolerance: float | None = None,
) -> CheckReport:
    """Runs one step of SGD on two copies of a model, one sharded and one not, and names the first
    parameter that differs.

    The unsharded copy's gradients are averaged over ranks by plain all-reduces. Both copies begin
    with rank 0's values and the same random numbers. Where policies cast parameters, inputs,
    outputs or gradients, the unsharded copy casts them alike. Where `quantize` rounds parameters,
    it computes with the rounded values. Gradients of parameters that `ignored` leaves alone are
    reduced over ranks in both. Every rank calls it, with its own batch, and holds the whole model
    several times: use a small one.

    Args:
        model: Not sharded; it stays as it is.
        batch: The second argument of `loss`.
        loss: A function of a model and a batch. None: the `.loss` of `model(**batch)` or
            `model(batch)` or, if there is none, the sum of its squares.
        wrap: A function that shards a model. None: `zero3.shard(model, policy=policy,
            process_group=process_group)`.
        policy: For `zero3.shard`.
        process_group: For `zero3.shard`.
        tolerance: The largest difference that counts as equal, relative to the largest absolute
            value of each tensor. None: 1e-9, 1e-3 and 5e-2 for float64, float32 and narrower
            dtypes; the narrowest of parameters and policies counts.

    Returns:
        A `CheckReport`.

    Raises:
        ValueError: `model` is sharded already, or can't be sharded, as for `shard`.
        RuntimeError: The unsharded step raised on a rank. Every rank raises it (a ValueError,
            TypeError or OSError as such).

    Example::

        found = zero3.check(plain_model, batch, loss_of)
        print(found)
        assert found.first is None
    """
    loss = _default_loss if loss is None else loss
    if is_sharded(model):
        raise ValueError(
            f"check shards a copy of the model, and this {type(model).__name__} is sharded "
            f"already (layer {states_of(model)[0].label}): call zero3.check before zero3.shard, "
            "with shard's policy=, or wrap= a function that shards. zero3.report and zero3.profile "
            "take sharded models"
        )
    wrap = wrap or partial(shard, policy=policy, process_group=process_group)
    sharded, plain = wrap(copy.deepcopy(model)), copy.deepcopy(model)
    first = states_of(sharded)[0]
    places, alone = _places(sharded)
    _begin_alike(plain, sharded, places, alone)
    step = partial(_step, batch=batch, loss=loss, device=first.device)
    expected = {"loss": {"": _plain_step(plain, sharded, places, step)}}
    found = {"loss": {"": step(sharded)}}
    left = {id(each.parameter) for each in ignored_of(states_of(sharded))}
    for each in alone.values():
        if each.requires_grad and id(each) in left:  # whoever leaves it alone reduces it
            each.grad = _over_ranks(each, each.grad, first)
    expected["gradient"] = {
        n: torch.zeros_like(p) if p.grad is None else p.grad
        for n, p in plain.named_parameters()
        if p.requires_grad
    }
    own = {name: each.grad for name, each in alone.items() if each.grad is not None}
    with full_gradients(sharded) as gathered:
        gathered |= own
        found["gradient"] = {
            name: gathered.get(name, torch.zeros_like(value))
            for name, value in expected["gradient"].items()
        }
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    torch.optim.SGD([*get_trainable_chunk(sharded), *alone.values()], lr=0.1).step()
    expected["value after the step"] = {name: p.detach() for name, p in plain.named_parameters()}
    with full_params(sharded):
        found["value after the step"] = {
            name: p.detach().clone() for name, p in sharded.named_parameters()
        }
    return _compared(
        expected, found, max(map(_tolerance, places.values())) if tolerance is None else tolerance
    )


def _compared(
    expected: dict[str, dict[str, Tensor]], found: dict[str, dict[str, Tensor]], tolerance: float
) -> CheckReport:
    """By kind and name. The last kind has all names, in the order of the report."""
    pairs = [
        (name, what, found[what][name], value)
        for what, values in expected.items()
        for name, value in values.items()
    ]
    differences = [_difference(*pair) for pair in pairs]
    least = torch.finfo(torch.float64).tiny
    beyond = [d for d in differences if not d.largest <= tolerance * d.scale + least]
    order = {name: number for number, name in enumerate(["", *expected["value after the step"]])}
    ratios = [d.largest / d.scale if d.scale else d.largest for d in differences]
    worst = torch.tensor(ratios, dtype=torch.float64).max().item()  # nan, if one of them is
    return CheckReport(sorted(beyond, key=lambda d: order[d.name]), len(pairs), worst)


class _Place(NamedTuple):
    """A parameter, and the layer that owns it."""

    state: LayerState
    sharded: ShardedParameter

    @property
    def in_format(self) -> bool:
        return not self.sharded.chunk.compute_dtype.is_floating_point

    @property
    def computed(self) -> torch.dtype:
        own = self.sharded.sites.parameter.dtype
        gathered = self.sharded.chunk.compute_dtype
        return compute_dtype(self.state.policy, own) if self.in_format else gathered


def _places(model: nn.Module) -> tuple[dict[str, _Place], dict[str, nn.Parameter]]:
    """Returns each parameter's place by its own name, and the parameters that no layer has: a
    policy leaves them alone, or nobody has wrapped them. All ranks call it.
    """
    with full_params(model):
        named = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in named.items()}
    places = {
        names[id(each.sites.parameter)]: _Place(state, each)
        for state in states_of(model)
        for each in state.parameters
    }
    return places, {name: each for name, each in named.items() if name not in places}


def _begin_alike(
    plain: nn.Module,
    sharded: nn.Module,
    places: dict[str, _Place],
    alone: dict[str, nn.Parameter],
) -> None:
    """Gives both copies rank 0's values, and `plain` those that formats make of them."""
    communicator = states_of(sharded)[0].communicator
    for tensor in [*plain.parameters(), *plain.buffers(), *alone.values()]:
        if communicator.world_size > 1:
            communicator.broadcast(tensor.detach())
    with full_params(sharded):
        for name, parameter in sharded.named_parameters():
            if name in places and places[name].in_format:
                plain.get_parameter(name).data.copy_(parameter.detach().clone())
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad and name in places:  # a master copy, as the chunks are
            parameter.data = parameter.data.to(places[name].sharded.chunk.shard.dtype)


def _over_ranks(parameter: nn.Parameter, found: Tensor | None, state: LayerState) -> Tensor:
    """The gradient of all ranks, from this rank's."""
    gradient = torch.zeros_like(parameter) if found is None else found
    if state.communicator.world_size > 1:
        state.communicator.all_reduce(gradient)
        if state.policy.gradient_reduction == "mean":
            gradient /= state.communicator.world_size
    return gradient


def _default_loss(model: nn.Module, batch: Any) -> Tensor:
    output = model(**batch) if isinstance(batch, Mapping) else model(batch)
    named = getattr(output, "loss", None)
    found: Tensor = named if isinstance(named, Tensor) else output.pow(2).sum()
    return found


def _tolerance(place: _Place) -> float:
    stored, computed = place.sharded.chunk.shard.dtype, place.computed
    if place.in_format:
        stored = computed
    reduced = gradient_dtype(place.state.policy, computed)
    narrowest = min(dtype.itemsize for dtype in (stored, computed, reduced))
    return _OF_HALF if narrowest < 4 else _OF_SINGLE if narrowest < 8 else _OF_DOUBLE


def _step(
    model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor], device: torch.device
) -> Tensor:
    with random_state_kept(device):
        torch.manual_seed(0)
        value = loss(model, batch)
        value.backward()  # type: ignore[no-untyped-call]
    return value.detach()


def _plain_step(
    plain: nn.Module,
    sharded: nn.Module,
    places: dict[str, _Place],
    step: Callable[[nn.Module], Tensor],
) -> Tensor:
    """`step` of `plain`, cast as `sharded` is. The gradients go to `plain`, in its own dtypes."""
    computing = _cast_alike(plain, sharded, places)
    first = states_of(sharded)[0]
    with agreeing(first, "check"):
        value = step(computing)
    gradients = {name: parameter.grad for name, parameter in computing.named_parameters()}
    for name, parameter in plain.named_parameters():
        if not parameter.requires_grad:
            continue
        found = gradients[name]
        if found is None and first.communicator.world_size == 1:
            continue
        place = places.get(name)
        if place is None:
            parameter.grad = _over_ranks(parameter, found, first)
            continue
        reduced = gradient_dtype(place.state.policy, place.computed)
        found = torch.zeros_like(parameter, dtype=reduced) if found is None else found.to(reduced)
        parameter.grad = _over_ranks(parameter, found, place.state).to(parameter.dtype)
    return value


def _cast_alike(plain: nn.Module, sharded: nn.Module, places: dict[str, _Place]) -> nn.Module:
    """A copy with the dtypes of computation, whose modules cast what the layers cast."""
    computing = copy.deepcopy(plain)
    for name, parameter in computing.named_parameters():
        if name in places:
            parameter.data = parameter.data.to(places[name].computed)
    for name, module in sharded.named_modules():
        if (state := state_behind(module)) is not None:
            alike = computing.get_submodule(name)
            inputs, output = dtypes_at_the_edges(state.policy)
            alike.register_forward_pre_hook(_before(inputs), with_kwargs=True)
            alike.register_forward_hook(_after(output))
    return computing


def _before(dtype: torch.dtype | None) -> Callable[..., Any]:
    return lambda module, args, kwargs: (cast(args, dtype), cast(kwargs, dtype))


def _after(dtype: torch.dtype | None) -> Callable[..., Any]:
    return lambda module, args, output: cast(output, dtype)


def _difference(name: str, what: str, found: Tensor, expected: Tensor) -> Difference:
    wide = torch.complex128 if expected.is_complex() else torch.float64
    found, expected = found.to(wide), expected.to(wide)
    apart = (found - expected).abs()
    apart = apart.masked_fill(found.isnan() & expected.isnan() | (found == expected), 0)
    largest = apart.max().item() if apart.numel() else 0.0
    # beside an infinity, finite elements would be equal whatever they are
    scale = expected.abs().nan_to_num(posinf=0.0).max().item() if expected.numel() else 0.0
    return Difference(name, what, largest, scale)
