"""An optimizer's step in turns, chunk by chunk: while one is stepped, the next one's numbers come,
and those of the last one leave.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..core.chunk import Chunk
from ..core.chunk_gradient import DeferredGradient
from ..guards.marks import StateMemory, state_of
from ..guards.optimizer_steps import layers_stepped_by
from ..guards.unreached import left_alone
from ..optim.state_memory import set_state_memory
from ..policy import directory_of
from ..scratch.mapped_files import MappedFiles
from ..stores.files import Files
from ..stores.untouched import to_bring, touch
from .one_by_one import narrowed, try_out
from .traffic import Traffic, Visit

__all__: list[str] = []


class StateFiles:
    """Memory for the state of one optimizer, beside the chunks in one directory."""

    def __init__(self, directory: str) -> None:
        self.files = MappedFiles(directory)
        self._reserved: defaultdict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)

    def reserve(self, numel: int, dtype: torch.dtype) -> None:
        """
        Raises:
            OSError: The disk is full.
            ValueError: There is no such directory.
        """
        self._reserved[numel, dtype].append(self.files.empty(numel, dtype))

    def place(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """A 1-D tensor with any values. None, at first with a warning, if there is no room."""
        if reserved := self._reserved[numel, dtype]:
            return reserved.pop()
        return self.files.place(numel, dtype, "state of the optimizer")

    def take_in(self, state: MutableMapping[str, Any]) -> None:
        """Moves those tensors of one parameter's state into files that are not there yet."""
        for key, value in state.items():
            if type(value) is not Tensor or not value.ndim or value.device.type != "cpu":
                continue
            place = None if value in self.files else self.place(value.numel(), value.dtype)
            if place is not None:
                state[key] = place.view(value.shape).copy_(value)


class ZerosInFiles(TorchFunctionMode):
    """Inside, an optimizer that makes state as zeros like a parameter makes it in a file, so that
    it is never in memory.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], files: StateFiles) -> None:
        super().__init__()
        self._own = {id(parameter) for parameter in parameters}
        self._files = files

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if (
            func is torch.zeros_like
            and id(args[0]) in self._own
            and options.keys() <= {"memory_format", "dtype"}
        ):
            like = args[0]
            place = self._files.place(like.numel(), options.get("dtype") or like.dtype)
            if place is not None:
                return place.zero_().view(like.shape)
        return func(*args, **options)


@dataclass(eq=False)
class Turn:
    """Those of the optimizer's parameters that are stepped together: in one chunk, or all that rest
    in no files.
    """

    chunk: Chunk | None
    files: StateFiles | None
    layer: str = ""  # for errors
    # by the number of their group
    parameters: dict[int, list[nn.Parameter]] = field(default_factory=dict)

    def all(self) -> Iterator[nn.Parameter]:
        return chain.from_iterable(self.parameters.values())

    def visit(self, optimizer: torch.optim.Optimizer) -> Visit | None:
        """What lies in files of all that the turn works on."""
        store = None if self.chunk is None else self.chunk.store
        if self.files is None or not isinstance(store, Files):
            return None
        parameters = list(self.all())
        gradients = [
            to_bring(p.grad)
            for p in parameters
            if p.grad is not None and not isinstance(p.grad, DeferredGradient)
        ]
        written = [parameter.data for parameter in parameters] + [
            gradient for gradient, is_written in gradients if is_written
        ]
        read = [gradient for gradient, is_written in gradients if not is_written]
        states = (optimizer.state.get(parameter, {}) for parameter in parameters)
        kept = chain.from_iterable(state.values() for state in states)
        state = [value for value in kept if type(value) is Tensor and value.ndim]
        return Visit(self.layer, store, written, read, self.files.files, state)


class Turns:
    """Makes an optimizer's turns. Its state lies in the directories of the chunks.

    When a turn's numbers are here, those of the turn before the last one have left.
    """

    def __init__(self, directories: Iterable[str]) -> None:
        self._files = {directory: StateFiles(directory) for directory in directories}
        self.traffic = Traffic()
        self._groups = 0  # whose parameters lead loads and saves here
        # the turn whose numbers are on their way
        self._coming: tuple[Turn, Future[None] | None] | None = None

    def of(self, optimizer: torch.optim.Optimizer) -> list[Turn]:
        """First what rests in no files, then chunk by chunk, in the order of the groups."""
        chunks: dict[int, tuple[Chunk, StateFiles, str]] = {}
        for state in layers_stepped_by(optimizer):
            if (directory := directory_of(state.policy)) is not None:
                if directory not in self._files:  # chunks of a group that was added later
                    self._files[directory] = StateFiles(directory)
                for chunk in state.chunks:
                    found = chunk, self._files[directory], state.label
                    chunks |= {id(part.parameter): found for part in chunk.parts}
        turns: dict[Chunk | None, Turn] = {None: Turn(None, None)}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                own, files, layer = chunks.get(id(parameter), (None, None, ""))
                turn = turns.setdefault(own, Turn(own, files, layer))
                turn.parameters.setdefault(number, []).append(parameter)
        return list(turns.values())

    def reserve(self, optimizer: torch.optim.Optimizer) -> None:
        """Finds room for what the optimizer will keep.

        Raises:
            ValueError: It can't step one chunk after another, or there is no such directory.
            OSError: The disk is full.
        """
        kept: dict[tuple[int, int, torch.dtype], list[torch.dtype]] = {}
        for turn in self.of(optimizer):
            for number, parameters in turn.parameters.items():
                for parameter in parameters:
                    kind = (number, parameter.ndim, parameter.dtype)
                    if kind not in kept:
                        kept[kind] = try_out(optimizer, optimizer.param_groups[number], parameter)
                    if turn.files is not None and parameter not in optimizer.state:
                        for dtype in kept[kind]:
                            turn.files.reserve(parameter.numel(), dtype)

    def lead_loads(self, optimizer: torch.optim.Optimizer) -> None:
        """From now on zero3's loads put state into files, and its saves wait until all that has
        left is written.
        """
        self._groups = len(optimizer.param_groups)
        for turn in self.of(optimizer):
            if (files := turn.files) is not None:
                memory = StateMemory(files.place, self.traffic.land)
                for parameter in turn.all():
                    set_state_memory(parameter, memory)

    def take_in(self, optimizer: torch.optim.Optimizer) -> None:
        """Moves state that is in memory, after a load of torch's, into files."""
        for turn in self.of(optimizer):
            self._take_in(optimizer, turn)

    def _take_in(self, optimizer: torch.optim.Optimizer, turn: Turn) -> None:
        if (files := turn.files) is not None:
            for parameter in turn.all():
                if parameter in optimizer.state:
                    files.take_in(optimizer.state[parameter])

    def make_all(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        """Makes one step. `step`: the optimizer's own, of all its parameters."""
        if len(optimizer.param_groups) > self._groups:  # `add_param_group` was called
            self.lead_loads(optimizer)
        turns = [t for t in self.of(optimizer) if any(p.grad is not None for p in t.all())]
        for turn, following in zip(turns, [*turns[1:], None], strict=False):
            self.make(optimizer, turn, following, step)
        self.traffic.end_step()

    def make(
        self,
        optimizer: torch.optim.Optimizer,
        turn: Turn,
        following: Turn | None,
        step: Callable[[], object],
    ) -> None:
        """Makes one turn, while the numbers of the following one come."""
        (expected, here), self._coming = self._coming or (None, None), None
        if expected is not turn:
            here = self._bring(optimizer, turn)
        if following is not None:
            self._coming = following, self._bring(optimizer, following)
        groups = optimizer.param_groups
        with narrowed(optimizer) as narrow:
            narrow([(groups[number], parameters) for number, parameters in turn.parameters.items()])
            if here is not None:
                here.result()
            self._step(optimizer, turn, step)
        if (visit := turn.visit(optimizer)) is not None:
            # a late thread holds none: the next ones would need other files
            self.traffic.let_go(visit._replace(gradients=[]))

    def _bring(self, optimizer: torch.optim.Optimizer, turn: Turn) -> Future[None] | None:
        return self.traffic.bring(visit) if (visit := turn.visit(optimizer)) else None

    def _step(
        self, optimizer: torch.optim.Optimizer, turn: Turn, step: Callable[[], object]
    ) -> None:
        fresh = [parameter for parameter in turn.all() if not optimizer.state.get(parameter)]
        # clipping may have left its multiplication for now
        touch(parameter.grad for parameter in turn.all())
        states = {s for p in turn.all() if (s := state_of(p)) is not None}
        in_files = turn.files is not None and fresh and ZerosInFiles(fresh, turn.files)
        with left_alone(optimizer, states), in_files or nullcontext():
            step()
        self._take_in(optimizer, turn)
