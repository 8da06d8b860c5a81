"""A layer's parameters in its modules. They are shown while the layer is fetched, and hidden while
it is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ..comm.communicator import Communicator
from ..comm.errors import Subject
from .autograd import as_plain_tensors, can_show, renew_versions, restore_versions
from .chunk import Chunk
from .flat import not_a_number
from .released import ReleasedParameter
from .sites import ParameterSites, become

__all__: list[str] = []

# in a module's __dict__: the names of its parameters, as a dict's keys. (`attributes_of` passes
# over a dict at once.)
_ORDER = "_zero3_order"


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


class LayerParameters(list[ShardedParameter]):
    """The parameters of one layer, in the order of its chunks and of their slots."""

    def __init__(self, subject: Subject, communicator: Communicator) -> None:
        """`subject`: the layer, for errors."""
        super().__init__()
        self._subject, self._communicator = subject, communicator
        self._out_of_order: list[nn.Module] = []
        # their versions while the layer was fetched; graphs save these
        self.versions: list[int] = []
        # whether a `requires_grad` may differ from the chunk's: see `guards/calls.py`
        self.toggled = False
        # the root's, if it owns some inside this layer
        self._lent_to: LayerParameters | None = None

    def add(self, chunk: Chunk, parameters: list[ParameterSites]) -> list[ShardedParameter]:
        """Adds those of a chunk, in the order of its slots. `hide` comes next."""
        blank = not_a_number(chunk.compute_dtype, chunk.device)
        remember_order(parameters)
        added = list[ShardedParameter]()
        for index, sites in enumerate(parameters):
            stand_in = sites.face.stand_in(sites, blank)
            if not can_show(old := sites.parameter, stand_in):
                sites.replace(nn.Parameter(stand_in, old.requires_grad))
                become(old, ReleasedParameter)  # whoever kept it, such as an optimizer, is told
            added.append(ShardedParameter(sites, chunk, index, stand_in))
        self += added
        self._out_of_order = shown_out_of_order(self)
        return added

    def move_into(self, chunks: Sequence[Chunk]) -> None:
        """From now on these chunks have them."""
        places = {
            slot.name: (chunk, index)
            for chunk in chunks
            for index, slot in enumerate(chunk.layout.slots)
        }
        moved = [
            ShardedParameter(sharded.sites, *places[sharded.sites.name], sharded.stand_in)
            for sharded in self
        ]
        self[:] = sorted(moved, key=lambda each: (chunks.index(each.chunk), each.index))
        self._out_of_order = shown_out_of_order(self)
        self.versions = [sharded.sites.parameter._version for sharded in self]

    # -- shown and hidden

    def show(self, changed: Sequence[Chunk], *, again: bool) -> None:
        """[fetch 5] Shows each parameter, and sets its version: graphs that saved the parameter at
        this version stay valid. `again`: they are shown already.

        [S2] Where a chunk has `changed`, older graphs hold old values: with a new version, torch's
        own check raises for them.
        """
        saved, saved_at = [], []
        for sharded, version in zip(self, self.versions, strict=True) if not again else ():
            sites, full = sharded.sites, sharded.chunk.full
            sites.show(full.views[sharded.index])
            if full.tracks_versions:
                saved.append(sites.parameter)
                saved_at.append(version)
        restore_versions(tuple(saved), tuple(saved_at))
        for module in self._out_of_order if not again else ():
            restore_order(module)
        if changed:
            renew_versions([each.sites.parameter for each in self if each.chunk in changed])
        if changed or len(saved) < len(self):  # otherwise they are what was set
            self.versions = [sharded.sites.parameter._version for sharded in self]

    def hide(self) -> None:
        versions = list[int]()
        for sharded in self:
            sites, full = sharded.sites, sharded.chunk.full
            versions.append(sites.parameter._version)
            sites.hide(full.views[sharded.index] if full.shows_released else sharded.stand_in)
        self.versions = versions

    def hide_put_back(self) -> None:
        for sharded in self:
            sharded.sites.hide_put_back()

    def invalidate_saved(self) -> None:
        """Gives hidden parameters a new version, so that torch raises its own error if a backward
        would read one.
        """
        renew_versions([each.sites.parameter for each in self if each.chunk.full.tracks_versions])

    # -- what a caller may have done to them

    def check_put_back(self, sites: ParameterSites, module: nn.Module, attribute: str) -> None:
        """Raises if a place that has not the hidden parameter has another one. If it was put back,
        its module lists it; if another one was refused, nothing is there.
        """
        found = module._parameters.get(attribute, module.__dict__.get(attribute, sites.parameter))
        if found is not sites.parameter:
            raise RuntimeError(
                f"rank {self._communicator.rank}: layer {self._subject.label}: parameter "
                f"{sites.name!r} was replaced after wrapping, found a {type(found).__name__}, "
                "expected the object that was wrapped, which stays one for life. Put it back, and "
                "give it other values inside `with zero3.full_params(module, writeback=True):`. "
                "torch.func.functional_call, which replaces parameters for a call, works inside "
                "`with zero3.resident(model):`."
            )

    def follow_requires_grad(self, chunk: Chunk) -> list[ShardedParameter]:
        """Gives those of the chunk its `requires_grad`, after the caller has changed that."""
        followed = [sharded for sharded in self if sharded.chunk is chunk]
        for sharded in followed:
            with as_plain_tensors():
                sharded.sites.parameter.requires_grad_(chunk.trains)
        return followed

    def look_at_toggles(self) -> None:
        """A `requires_grad` may differ from the chunk's: the next forward looks."""
        self.toggled = True

    def lend_to(self, root: LayerParameters) -> None:
        """The root's own layer owns parameters inside this one."""
        self._lent_to = root

    def may_get_gradients(self) -> bool:
        """Whether gradients may come for parameters in the layer's modules: its own, or those that
        the root's own layer has.
        """
        return any(owner._any_train() for owner in (self, self._lent_to) if owner is not None)

    def _any_train(self) -> bool:
        if not any(sharded.chunk.shard.requires_grad for sharded in self):
            return False
        return not self.toggled or any(sharded.sites.parameter.requires_grad for sharded in self)

    def find_toggled(self) -> list[ShardedParameter]:
        """Those whose `requires_grad` differs from their chunk's."""
        found = [
            sharded
            for sharded in self
            if sharded.sites.parameter.requires_grad != sharded.chunk.trains
        ]
        self.toggled = bool(found)
        return found


def remember_order(parameters: Iterable[ParameterSites]) -> None:
    """Stores the order of each module's parameters, before any of them is hidden."""
    for module in {module for sites in parameters for module, _ in sites.places}:
        module.__dict__.setdefault(_ORDER, dict.fromkeys(module._parameters))


def shown_out_of_order(parameters: Sequence[ShardedParameter]) -> list[nn.Module]:
    """The modules that may list their parameters in another order than before wrapping, when these
    are shown one after another: chunk by chunk, beside some that are ignored or another layer's.
    """
    shown: dict[nn.Module, list[str]] = {}
    for module, name in (place for each in parameters for place in each.sites.places):
        shown.setdefault(module, []).append(name)
    return [
        module
        for module, names in shown.items()
        if names != [n for n in vars(module)[_ORDER] if module._parameters.get(n, n) is not None]
    ]


def restore_order(module: nn.Module) -> None:
    """Puts a module's shown parameters into the order that they had before wrapping."""
    listed = module._parameters
    ordered = {name: each for name, each in parameters_of(module) if name in listed}
    listed.clear()
    listed.update(ordered)


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
