"""A layer's parameters in its modules. They are found, checked, shown while the layer is fetched,
and hidden while it is not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .autograd import restore_versions
from .chunk import Chunk
from .released import ReleasedParameter

__all__: list[str] = []

# hold, but are never called
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_ORDER = "_zero3_order"  # in a module's __dict__: the names of its parameters
WRAPPED = "_zero3_module"  # in a layer's __dict__: the module that it wraps
IN_MODEL = "_zero3_in_model"  # in a layer's __dict__, if the layer has a place in another module
# Under which torch's wrappers hold the module that they wrap: those of activation checkpointing and
# offloading, and of torch.compile.
_WRAPPED = ("_checkpoint_wrapped_module", "_orig_mod")
_PREFIX = re.compile(rf"(?<![^.])(?:{'|'.join(_WRAPPED)})\.")


@dataclass(eq=False)
class ParameterSites:
    """One parameter, and all places in the layer's modules that have it. A tied parameter has
    several places.
    """

    name: str
    parameter: nn.Parameter
    places: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the parameter's slot."""
        return tuple(self.parameter.shape)

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of the chunk."""
        return self.parameter.dtype

    def to_store(self, device: torch.device) -> Tensor:
        """What is written into the slot, before the parameter is hidden for the first time. The
        chunk is on `device`.
        """
        return self.parameter

    def values_in(self, slot: Tensor) -> Tensor:
        """The parameter's values, from what its slot in a full buffer holds."""
        return slot

    def write(self, values: Tensor, slot: Tensor) -> None:
        """Puts values, in the parameter's shape, into its slot in a full buffer."""
        if values.data_ptr() != slot.data_ptr():
            slot.copy_(values)

    def stand_in(self, blank: Tensor) -> Tensor:
        """The parameter's data while it is released: the 0-dim `blank`, stretched to its shape."""
        return blank.expand(self.parameter.shape)

    def data(self) -> Tensor:
        """The shown parameter's data."""
        return self.parameter.data

    def show(self, value: Tensor) -> None:
        """Makes the parameter an ordinary one whose data is `value`, its slot of the full buffer.
        Nothing is copied.
        """
        self.parameter.__class__ = nn.Parameter
        self.parameter.data = value
        for module, attribute in self.places:
            if module.__dict__.pop(attribute, None) is not self.parameter:
                raise RuntimeError(
                    f"{self.name}: the module's attribute {attribute!r} was replaced after "
                    "wrapping. A wrapped parameter stays one object; change its values inside "
                    "`with zero3.full_params(module, writeback=True):`."
                )
            module._parameters[attribute] = self.parameter

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
        for module, attribute in self.places:
            # not into _parameters: some modules keep lists of their own (LSTM)
            setattr(module, attribute, parameter)
        self.parameter = parameter


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    """A layer's parameter: its places in the modules, its chunk, and the number of its slot
    there.
    """

    sites: ParameterSites
    chunk: Chunk
    index: int
    stand_in: Tensor  # the parameter's data while it is released, in its shape

    @property
    def value(self) -> Tensor:
        return self.chunk.views[self.index]


def show_all(sharded: Iterable[ShardedParameter], versions: Iterable[int]) -> None:
    """[fetch 5] Shows each parameter, and sets its version: graphs that saved the parameter at this
    version stay valid.
    """
    saved, saved_at = [], []
    for each, version in zip(sharded, versions, strict=True):
        each.sites.show(each.chunk.full.views[each.index])
        if each.chunk.tracks_versions:
            saved.append(each.sites.parameter)
            saved_at.append(version)
    restore_versions(saved, saved_at)


def own_name(name: str) -> str:
    """The name that a tensor has in the model without torch's wrappers: they come and go, files and
    options stay.
    """
    return _PREFIX.sub("", name)


def own_module_name(name: str) -> str:
    """Works as `own_name`, for a module's name."""
    return own_name(f"{name}.").removesuffix(".")


def wrapped_in(module: nn.Module) -> nn.Module | None:
    """Returns the module inside one of torch's wrappers, or None if `module` is no such wrapper."""
    return next(
        (child for name in _WRAPPED if (child := module._modules.get(name)) is not None), None
    )


def named(names: Sequence[str], most: int = 6) -> str:
    """Returns the first of many names, and the number of the others, for errors."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def is_callable(module: nn.Module) -> bool:
    """Whether it has a forward. Lists and dicts of modules or parameters have none, nor has a bare
    `nn.Module()`.
    """
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def dotted(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def own_modules(
    module: nn.Module,
    is_layer: Callable[[nn.Module], bool],
    prefix: str = "",
    seen: set[nn.Module] | None = None,
) -> Iterator[tuple[str, nn.Module]]:
    """`module` and the modules inside it, in order, each once. Layers inside it are left out, with
    their modules.

    Names are those of the model without torch's wrappers.
    """
    seen = set() if seen is None else seen
    if module in seen or is_layer(module):
        return
    seen.add(module)
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from own_modules(
                child, is_layer, prefix if name in _WRAPPED else dotted(prefix, name), seen
            )


def find_parameters(
    module: nn.Module,
    is_layer: Callable[[nn.Module], bool],
    elsewhere: Container[int] = (),
    borrowed: Iterable[ParameterSites] = (),
) -> list[ParameterSites]:
    """The parameters that belong to `module`'s own layer, in order. A tied parameter comes once,
    under its first name.

    Parameters with their ids in `elsewhere` are left out. `borrowed` parameters, which are inside
    other layers, come first.
    """
    found = {
        id(sites.parameter): ParameterSites(sites.name, sites.parameter, list(sites.places))
        for sites in borrowed
    }
    for prefix, owner in own_modules(module, is_layer):
        for attribute, parameter in [*owner._parameters.items(), *released_in(owner)]:
            if parameter is None or id(parameter) in elsewhere:
                continue
            sites = found.setdefault(
                id(parameter), ParameterSites(dotted(prefix, attribute), parameter)
            )
            if (owner, attribute) not in sites.places:
                sites.places.append((owner, attribute))
    return list(found.values())


def remember_order(parameters: Iterable[ParameterSites]) -> None:
    """Stores the order of each module's parameters, before any of them is hidden. Chunks may show
    them again in another order.
    """
    for module in {module for sites in parameters for module, _ in sites.places}:
        module.__dict__.setdefault(_ORDER, tuple(module._parameters))


def restore_order(parameters: Iterable[ParameterSites]) -> None:
    """Puts shown parameters into the order that they had before wrapping, because a state dict has
    this order.
    """
    for module in {module for sites in parameters for module, _ in sites.places}:
        ordered = {
            name: parameter
            for name, parameter in parameters_of(module)
            if name in module._parameters
        }
        if list(ordered) != list(module._parameters):
            module._parameters.clear()
            module._parameters.update(ordered)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that a layer wraps, or `module` itself if it is no layer."""
    inner: nn.Module = vars(module).get(WRAPPED, module)
    return inner


def plain_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules of the unsharded model: for each layer the module that it wraps."""
    return map(unwrapped, model.modules())


def parameters_of(module: nn.Module) -> list[tuple[str, nn.Parameter | None]]:
    """The module's own parameters, shown and released, in their order before wrapping."""
    found: dict[str, nn.Parameter | None] = {**module._parameters, **dict(released_in(module))}
    first = [name for name in vars(module).get(_ORDER, ()) if name in found]
    return [(name, found[name]) for name in dict.fromkeys([*first, *found])]


def released_in(module: nn.Module) -> list[tuple[str, ReleasedParameter]]:
    """The released parameters that `module` itself has."""
    return [
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, ReleasedParameter)
    ]


def check_parameters(
    parameters: list[ParameterSites], dtype: torch.dtype | None, label: str
) -> None:
    """Raises ValueError, with the parameter's name, if one of `parameters` can't be sharded.
    Changes nothing.
    """
    for sites in parameters:
        parameter = sites.parameter
        if isinstance(parameter, ReleasedParameter):
            raise ValueError(
                f"parameter {sites.name!r} of {label} is already sharded, as "
                f"{parameter.zero3_name}. Wrap a module once; if the parameter is tied across "
                "layers, put both into one Zero3Layer, or use zero3.shard(model)."
            )
        if hasattr(parameter, "ds_id"):
            raise ValueError(
                f"parameter {sites.name!r} of {label} has been partitioned by DeepSpeed "
                "(zero.Init), which keeps its values: build the "
                'model without it, on torch.device("meta") if it does not fit'
            )
        if type(parameter) is not nn.Parameter or type(parameter.data) is not Tensor:
            raise ValueError(
                f"parameter {sites.name!r} is a {type(parameter).__name__} (data: "
                f"{type(parameter.data).__name__}), expected a plain torch.nn.Parameter: "
                "subclasses hold more than flat values. Convert it before wrapping, or leave it "
                "out."
            )
        if dtype is not None and parameter.requires_grad and parameter.dtype != dtype:
            raise ValueError(
                f"trainable parameter {sites.name!r} is {parameter.dtype}, expected "
                f"dtype={dtype}: dtype checks what the optimizer updates, it converts nothing. "
                "Convert the module before wrapping, or drop the argument."
            )
    _check_overlap(
        [sites for sites in parameters if not sites.parameter.is_meta and sites.parameter.numel()]
    )


def _check_overlap(parameters: list[ParameterSites]) -> None:
    spans = []
    for sites in parameters:
        parameter = sites.parameter
        if _overlaps_itself(parameter):
            raise ValueError(
                f"parameter {sites.name!r} overlaps itself (shape {tuple(parameter.shape)}, "
                f"stride {parameter.stride()}): a tensor with several names for one element can't "
                "be trained. Use .clone() before wrapping."
            )
        last = sum(
            (size - 1) * stride
            for size, stride in zip(parameter.shape, parameter.stride(), strict=True)
        )
        spans.append(
            (
                parameter.data_ptr(),
                parameter.data_ptr() + (last + 1) * parameter.element_size(),
                sites,
            )
        )
    # spans that end behind the start of the present one
    reached: list[tuple[int, ParameterSites]] = []
    for start, stop, sites in sorted(spans, key=lambda span: span[:2]):
        reached = [(end, other) for end, other in reached if end > start]
        for _, other in reached:
            # every element is compared, because ranges may overlap without a shared one
            # (interleaved columns of one buffer)
            if torch.isin(_addresses(other.parameter), _addresses(sites.parameter)).any():
                raise ValueError(
                    f"parameters {other.name!r} and {sites.name!r} overlap in memory but are two "
                    "objects. Make them one Parameter if they are tied, or .clone() one of them."
                )
        reached.append((stop, sites))


def _overlaps_itself(tensor: Tensor) -> bool:
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < extent:
            return len(set(_addresses(tensor).tolist())) < tensor.numel()
        extent += (size - 1) * stride
    return False


def _addresses(tensor: Tensor) -> Tensor:
    """The address of every element, in bytes."""
    index = torch.tensor(tensor.data_ptr())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        index = index[..., None] + torch.arange(size) * stride * tensor.element_size()
    return index.flatten()
