"""The tensors of a model's files, one after another, while the chunks that hold them are read: one
or two layers' at a time. Nothing of the model changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..access import sharded_in
from ..checkpoint.contents import Contents
from ..checkpoint.meta_buffers import twin
from ..comm.mesh import shards_of
from ..conductors.conducted import unconducted
from ..core.chunk import Chunk
from ..core.flat import view
from ..core.layer_state import LayerState
from ..core.parameters import ShardedParameter, parameters_of
from ..core.ticket import Ticket
from ..modules import named, plain_modules, unwrapped
from .index_maps import Computed, Whole
from .outputs import Output, is_adapted, state_of_adapter

__all__: list[str] = []

_ALIGNED = 16  # bytes
_OF_EXPERTS = -1  # whose turn with memory is their own


class Walked(NamedTuple):
    """A tensor that the walk has come to. The functions work until the walk goes on."""

    output: Output
    # writes its elements, from number `start` on, into a flat tensor of its dtype
    fill: Callable[[Tensor, int], None]
    # the flat tensor where it was read, which the caller may write into; None: it has to be filled
    as_read: Callable[[], Tensor | None]


class _ReadTogether(NamedTuple):
    """Tensors of the same layers, or of the same parameter of experts, and the chunks that they,
    and adapters for them, are in.
    """

    outputs: list[Output]
    chunks: list[Chunk]

    @property
    def of_experts(self) -> bool:
        """They stay at home in training: no rank has room for all of a layer's."""
        return any(chunk.in_part for chunk in self.chunks)


class _Reading:
    """How a chunk is read and, from `start` to `end`, where."""

    full: Tensor

    def __init__(self, state: LayerState, chunk: Chunk, dtype: torch.dtype, *, alone: bool) -> None:
        """`alone`: for one group of tensors."""
        self._state, self._chunk, self.alone = state, chunk, alone
        self._dtype = dtype
        self.found = False  # in the chunk's full buffer, which is there already
        self.begun = False
        self._ticket: Ticket | None = None

    @property
    def nbytes(self) -> int:
        """So many that a tensor of any dtype may begin behind it."""
        nbytes = self._chunk.layout.padded_numel * self._dtype.itemsize
        return 0 if self.found else -(-nbytes // _ALIGNED) * _ALIGNED

    @property
    def may_be_found(self) -> bool:
        """Whether the full buffer stays from step to step, as what is read here."""
        chunk, full = self._chunk, self._chunk.full.tensor
        its = self._state.stays(chunk) and not (
            chunk.resident or chunk.gathering.wire.rounds(chunk)
        )
        return its and full.dtype == self._dtype

    def gives(self, dtype: torch.dtype) -> bool:
        """Whether it is read in that dtype, into memory that is not the model's."""
        return not self.found and not self._chunk.read_only and self._dtype == dtype

    def start(self, memory: Tensor) -> None:
        self.begun = True
        if self.found:
            self.full = self._chunk.full.tensor
        else:
            numel = self._chunk.layout.padded_numel
            self.full = memory[: numel * self._dtype.itemsize].view(self._dtype)
            self._ticket = self._state.chunks.read(self._chunk, self.full)

    def wait(self) -> None:
        if self._ticket is not None:
            self._ticket.wait()
            self._ticket = None
            self._chunk.store.rest(self._chunk.shard.data)
            self._state.settle()

    def end(self) -> None:
        self.begun = False
        del self.full


class WeightWalk:
    """All ranks that share a model's chunks walk together. Who fills no tensors takes part in what
    needs all of them: gathers, and broadcasts of buffers.
    """

    def __init__(
        self,
        contents: Contents,
        outputs: Iterable[Output],
        adapted: Iterable[Any] = (),
        read: Callable[[nn.Parameter, Tensor], None] | None = None,
        encoder: tuple[Any, str] = (None, ""),
    ) -> None:
        """`adapted`: modules whose adapters peft merges into the values. `read`: reads into a
        tensor what a quantised parameter was before. `encoder`: a peft model, and its adapter whose
        prompt encoder computes tensors.

        Raises:
            RuntimeError: Parameters have no values.
            ValueError: Adapters are merged already, or can't be merged.
        """
        self.contents, self._read, self._encoder = contents, read, encoder
        self._adapted = _that_merge(adapted)
        self._sharded = sharded_in(contents.states)
        states = {chunk: state for state in contents.states for chunk in state.chunks}
        groups: dict[tuple[int, ...], list[Output]] = {}
        for output in outputs:
            chunks = {s.chunk for s in self._sources([output])}
            numbers = sorted({contents.states.index(states[chunk]) for chunk in chunks})
            alone = sorted(id(chunk) for chunk in chunks if chunk.in_part)
            groups.setdefault((*numbers, -1, *alone), []).append(output)
        self._groups = [_ReadTogether(group, self._chunks_of(group)) for group in groups.values()]
        self.outputs = [output for group in self._groups for output in group.outputs]
        self._used = Counter(name for output in self.outputs for name in output.index_map.sources)
        uses = Counter(chunk for group in self._groups for chunk in group.chunks)
        self._readings = {
            chunk: _Reading(states[chunk], chunk, dtype, alone=uses[chunk] == 1)
            for chunk, dtype in self._read_in(uses).items()
        }
        self._try_merging()
        self._memory: dict[int, Tensor] = {}  # of readings, one after another, by their turn
        self._others: dict[str, Tensor] = {}  # buffers, flat, of the present group
        # by id of the parameter: values of the present tensor, and what is merged where it is read
        self._values: dict[int, Tensor] = {}
        self._merged: set[int] = set()

    def _sources(self, outputs: Sequence[Output]) -> list[ShardedParameter]:
        known = self.contents.parameters
        names = dict.fromkeys(name for o in outputs for name in o.index_map.sources)
        return [known[name] for name in names if name in known]

    def _chunks_of(self, outputs: list[Output]) -> list[Chunk]:
        needed = {id(s.sites.parameter) for s in self._sources(outputs)}
        for module in self._merging_into(needed):
            if any(id(p) not in self._sharded for p in _base_of(module).values()):
                raise ValueError(
                    f"the adapters of a {type(module).__name__} can't be merged: the policy leaves "
                    "parameters of its base alone (ignored)"
                )
            needed |= {id(p) for p in _parameters_in(module).values()}
        found = [self._sharded[each] for each in self._sharded if each in needed]
        if empty := [s.sites.name for s in found if s.index in s.chunk.unloaded]:
            raise RuntimeError(f"{named(empty)} have no values yet (meta device): load them before")
        return list(dict.fromkeys(sharded.chunk for sharded in found))

    def _merging_into(self, parameters: set[int]) -> list[Any]:
        return [m for m in self._adapted if any(id(p) in parameters for p in _base_of(m).values())]

    def _read_in(self, chunks: Iterable[Chunk]) -> dict[Chunk, torch.dtype]:
        """The dtype of each chunk's tensors in the end, if it is one and no longer: fewer bytes
        travel, and nobody casts. What peft computes with is read as it is stored.
        """
        computes = {id(p) for module in self._adapted for p in _parameters_in(module).values()}
        found: dict[Chunk, set[torch.dtype]] = {chunk: set() for chunk in chunks}
        for output in self.outputs:
            for sharded in self._sources([output]):
                exact = isinstance(output.index_map, Computed)
                exact |= id(sharded.sites.parameter) in computes or sharded.chunk.read_only
                found[sharded.chunk].add(sharded.chunk.shard.dtype if exact else output.dtype)
        for chunk, dtypes in found.items():
            if len(dtypes) > 1 or any(d.itemsize > chunk.shard.dtype.itemsize for d in dtypes):
                found[chunk] = {chunk.shard.dtype}
        return {chunk: next(iter(dtypes), chunk.shard.dtype) for chunk, dtypes in found.items()}

    def _try_merging(self) -> None:
        """Each kind of module is merged once, with numbers of no meaning. So what peft refuses is
        known to all ranks before the first gather.
        """
        used = {id(s.sites.parameter) for s in self._sources(self.outputs)}
        kinds = {_kind_of(module): module for module in self._merging_into(used)}
        for module in kinds.values():
            ids = self._sharded.keys() & map(id, _parameters_in(module).values())
            _merged(module, {each: _any_numbers(self._sharded[each]) for each in ids})

    @property
    def layers(self) -> list[list[Output]]:
        """Tensors that are read together."""
        return [group.outputs for group in self._groups]

    # -- the walk

    def stays(self) -> list[Chunk]:
        """Chunks that need no gather, unless a rank has changed its own, or has no full buffer."""
        return [chunk for chunk, reading in self._readings.items() if reading.may_be_found]

    def find(self, chunks: Iterable[Chunk]) -> None:
        """These are found in their full buffers."""
        for chunk in chunks:
            self._readings[chunk].found = True

    def tensors(self, ahead: int = 0) -> Iterator[Walked]:
        """Yields each tensor. `ahead`: how many layers are gathered beside the present one."""
        last = {chunk: n for n, group in enumerate(self._groups) for chunk in group.chunks}
        for number, group in enumerate(self._groups):
            self._start(number, 1 + ahead)
            for chunk in group.chunks:
                self._readings[chunk].wait()
            for following in range(number + 1, min(number + 1 + ahead, len(self._groups))):
                if not self._groups[following].of_experts:
                    self._start(following, 1 + ahead)
            self._others = self._received(group.outputs)
            for output in group.outputs:
                yield Walked(output, partial(self._fill, output), partial(self._as_read, output))
            self._values.clear()
            self._others.clear()
            for chunk in group.chunks:
                if last[chunk] == number:
                    self._readings[chunk].end()
        self._memory.clear()

    def _start(self, number: int, turns: int) -> None:
        """`turns`: how many layers are read at the same time. They take turns with memory."""
        start = 0
        for reading in (self._readings[chunk] for chunk in self._groups[number].chunks):
            if reading.begun:
                continue
            if reading.alone:
                memory = self._memory_of(number, turns)[start:]
                start += reading.nbytes
            else:
                device = self.contents.device
                memory = torch.empty(reading.nbytes, dtype=torch.uint8, device=device)
            reading.start(memory)

    def _memory_of(self, number: int, turns: int) -> Tensor:
        """For the chunks that are read for a group alone. It is made once, and large enough for
        every turn: to take new pages takes longer than a gather, and whoever still holds the last
        tensor would keep them.
        """
        turn = self._turn(number, turns)
        if turn not in self._memory:
            sizes = [
                sum(r.nbytes for r in map(self._readings.__getitem__, group.chunks) if r.alone)
                for other, group in enumerate(self._groups)
                if self._turn(other, turns) == turn
            ]
            device = self.contents.device
            self._memory[turn] = torch.empty(max(sizes), dtype=torch.uint8, device=device)
        return self._memory[turn]

    def _turn(self, number: int, turns: int) -> int:
        return _OF_EXPERTS if self._groups[number].of_experts else number % turns

    def _received(self, outputs: Sequence[Output]) -> dict[str, Tensor]:
        """Buffers, with the values of the first rank."""
        others, device = self.contents.others, self.contents.device
        ranks = shards_of(unconducted(self.contents.communicator))
        found = {}
        for name in dict.fromkeys(n for o in outputs for n in o.index_map.sources if n in others):
            copy = torch.empty(others[name].shape, dtype=others[name].dtype, device=device)
            copy.copy_(others[name].detach())
            if ranks.world_size > 1 and copy.numel():
                ranks.broadcast(copy)
            found[name] = copy.view(-1)
        return found

    # -- one tensor

    def in_place(self, together: Iterable[Sequence[Output]]) -> set[str]:
        """Of tensors that are asked for together, the names of those that stay where they were read
        until the walk goes on from the last one.
        """
        numbers = {o.name: number for number, g in enumerate(self._groups) for o in g.outputs}
        return {
            output.name
            for outputs in together
            for output in outputs
            if numbers[output.name] == numbers[outputs[-1].name]
            and self._is_as_read(output, dequantised=False)
        }

    def _is_as_read(self, output: Output, *, dequantised: bool) -> bool:
        """Whether its elements lie side by side, in its dtype, in memory that is not the model's.
        `dequantised`: also in memory that is made for them.
        """
        known, name = self.contents, output.index_map.sources[0]
        if not isinstance(output.index_map, Whole) or self._used[name] > 1:
            return False
        if name in known.others:
            return known.dtype(name) == output.dtype
        chunk = known.parameters[name].chunk
        if chunk.read_only and dequantised:
            return known.dtype(name) == output.dtype
        return self._readings[chunk].gives(output.dtype)

    @torch.no_grad()
    def _as_read(self, output: Output) -> Tensor | None:
        if not self._is_as_read(output, dequantised=True):
            return None
        return self._values_of(output)[output.index_map.sources[0]]

    @torch.no_grad()
    def _fill(self, output: Output, out: Tensor, start: int = 0) -> None:
        if isinstance(output.index_map, Computed):
            out.copy_(self._computed(output)[start : start + out.numel()])
            return
        values = self._values_of(output)
        output.index_map.fill(
            out,
            start,
            lambda name, first, into: into.copy_(values[name][first : first + len(into)]),
            lambda name, places: values[name][places.to(out.device)],
        )

    def _values_of(self, output: Output) -> dict[str, Tensor]:
        """By name, flat."""
        known, names = self.contents.parameters, output.index_map.sources
        ids = {name: id(known[name].sites.parameter) for name in names if name in known}
        for gone in self._values.keys() - set(ids.values()):
            del self._values[gone]
        self._merge(set(ids.values()) - self._merged - self._values.keys())
        for each in ids.values():
            if each not in self._values:
                self._values[each] = self._value(each)
        return self._others | {name: self._values[each].reshape(-1) for name, each in ids.items()}

    def _value(self, parameter: int) -> Tensor:
        """A view of what is read or, of a quantised parameter, new memory."""
        sharded = self._sharded[parameter]
        sites, chunk = sharded.sites, sharded.chunk
        slot = view(self._readings[chunk].full, chunk.layout, sharded.index)
        value = sites.face.value(sites, slot)
        if chunk.read_only and self._read is not None:
            self._read(sites.parameter, value)
        return value

    def _merge(self, parameters: set[int]) -> None:
        """Merges adapters where the parameters are read. What can't be written there is merged in
        memory of its own, and kept for the present tensor.
        """
        modules = self._merging_into(parameters)
        if not modules:
            return
        targets = {id(p) for module in modules for p in _base_of(module).values()}
        everything = {id(p) for module in modules for p in _parameters_in(module).values()}
        values = {each: self._value(each) for each in everything & self._sharded.keys()}
        in_place = {
            each
            for each in targets - self._merged
            if (chunk := self._sharded[each].chunk) in self._readings
            and self._readings[chunk].gives(chunk.shard.dtype)
        }
        for each in targets - in_place:
            if not self._sharded[each].chunk.read_only:
                values[each] = values[each].clone()
        before = dict(values)
        for module in modules:
            values |= _merged(module, values)
        for each in in_place:
            if values[each].data_ptr() != before[each].data_ptr():
                before[each].copy_(values[each])
        self._merged |= in_place
        self._values |= {each: values[each] for each in targets - self._merged}

    def _computed(self, output: Output) -> Tensor:
        """By peft, on a copy of the modules: those of the model would fetch their layers."""
        model, adapter = self._encoder
        copy = _copy_with(model, model.prompt_encoder[adapter], lambda p: self._value(id(p)))
        return state_of_adapter(copy, adapter, {})[output.name].flatten()


def _copy_with(
    model: nn.Module, inside: nn.Module, value_of: Callable[[nn.Parameter], Tensor]
) -> Any:
    """A copy of the model's modules, which peft may write into: it notes what it has merged, keeps
    weights, and swaps modules. Those inside of `inside` have values.
    """
    copies: dict[nn.Module, nn.Module] = {}
    root = twin(model, copies)
    for module in plain_modules(inside):
        attributes = vars(copy := copies[module])
        attributes |= {
            k: v.copy() for k, v in attributes.items() if isinstance(v, (dict, list, set))
        }
        copy._buffers.update(module._buffers)
        for name, parameter in parameters_of(module):
            if parameter is not None:
                copy._parameters[name] = nn.Parameter(value_of(parameter), requires_grad=False)
    return root


def _that_merge(modules: Iterable[Any]) -> list[Any]:
    found = [module for module in modules if is_adapted(module)]
    for module in found:
        merge = getattr(type(module), "merge", None)
        if getattr(merge, "__qualname__", "BaseTunerLayer.merge") == "BaseTunerLayer.merge":
            raise ValueError(
                f"the adapters of a {type(module).__name__} can't be merged: it has no merge"
            )
    inside = {id(inner) for m in found for inner in plain_modules(m.get_base_layer())}
    found = [module for module in found if id(module) not in inside]  # the outer one merges both
    if any(module.merged_adapters for module in found):
        raise ValueError(
            "adapters are merged into the model already (merge_adapter): take that back first "
            "(unmerge_adapter)"
        )
    return found


@torch.no_grad()
def _merged(module: Any, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """What peft makes of the base's parameters. Values are by the parameters' ids."""
    ids = {place: id(parameter) for place, parameter in _base_of(module).items()}
    copy = _copy_with(module, module, lambda p: values.get(id(p), p))
    copy.merge()
    return {ids[place]: p.data for place, p in _base_of(copy).items() if place in ids}


def _kind_of(module: Any) -> str:
    """A text that is the same if peft merges in the same way: options show in shapes."""
    classes = type(module), type(unwrapped(module.get_base_layer()))
    shapes = [tuple(parameter.shape) for parameter in _parameters_in(module).values()]
    return f"{classes} {shapes} {module.active_adapters}"


def _any_numbers(sharded: ShardedParameter) -> Tensor:
    """In the parameter's shape, and the dtype in which it is merged."""
    shape, chunk = sharded.stand_in.shape, sharded.chunk
    dtype = sharded.stand_in.dtype if chunk.read_only else chunk.shard.dtype
    return torch.linspace(0.1, 1, shape.numel(), dtype=dtype, device=chunk.device).view(shape)


def _base_of(module: Any) -> dict[tuple[int, str], nn.Parameter]:
    """The parameters that the module's adapters are merged into, by their places."""
    return _parameters_in(module.get_base_layer())


def _parameters_in(module: nn.Module) -> dict[tuple[int, str], nn.Parameter]:
    return {
        (number, name): parameter
        for number, inner in enumerate(plain_modules(module))
        for name, parameter in parameters_of(inner)
        if parameter is not None
    }
