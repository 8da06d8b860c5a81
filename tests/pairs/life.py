"""A short life of a model, told twice: by ranks that share a sharded model, and by plain torch in one process.

A life is made of rows. Each row is one capability: what it asks of the policy and of the model, and what it does at each point of
the life, on both sides. No row knows of another one. The points, in order:

    begins                          the model is sharded, there is no optimizer yet
    for each epoch:
        between                     (not before the first)
        inside                      a context around the epoch's steps
        for each step, each micro-batch:
            prepares, around        what the model is told, and a context around forward and backward
            forward, loss, backward
        before_step, step           after the last backward
    ends, resumes                   the model's last breath on some ranks, and its first on others (between two chapters)
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import zero3
from tests.pairs.model import Data, Model, is_base, made, shaped
from tests.support.reference import assert_close
from zero3 import ShardingPolicy

EPOCHS = 3
World = tuple[int, int]  # replicas, and ranks that share the model in each
GROUP: World = (0, 2)  # no mesh
FILES = "/files"  # a directory, which is known when the life begins


class Row:
    """One value of one axis. What is not overridden does nothing; `plain_x` is what one process does for `x`.

    Attributes:
        words: What an error has to say that is about this row.
        fields: Of the policy.
        shape: Of the model, fields of `Shape`.
        micros: How many micro-batches its step has at least.
        world: The mesh that it needs.
        tolerance: How far its numbers are from those of one process, which rounds where it rounds.
        streams: Whether it moves bytes to or from an accelerator, or makes or frees memory there: then the simulated device has it too.
    """

    words: tuple[str, ...] = ()
    fields: Mapping[str, Any] = MappingProxyType({})
    shape: Mapping[str, Any] = MappingProxyType({})
    micros = 1
    world: World | None = None
    tolerance = 1e-9
    streams = False
    parts = 1  # ranks that hold parts of the same sequences
    optional: tuple[str, ...] = ()  # towers, by name
    uneven = False  # micro-batches have different numbers of tokens
    forward: Callable[..., Tensor] | None = None  # in place of the model's own
    checkpoint: Callable[..., Tensor] | None = None  # around all of it
    makes: type[torch.optim.Optimizer] | None = None  # the optimizer's class, in place of SGD; other rows wrap what it makes

    def __init__(self, word: str = "", **given: Any) -> None:
        self.words = (word,) if word else self.words
        for name, value in given.items():
            assert hasattr(type(self), name), name
            setattr(self, name, value)

    # -- on ranks

    def prepares(self, one: Side, model: Any, rank: int, micro: int) -> None:
        """On both sides."""

    def builds(self, one: Sharded, model: Any) -> None:
        """Before the model is sharded."""

    def begins(self, one: Sharded) -> None: ...
    def optimizer(self, one: Sharded, optimizer: Any) -> Any:
        return optimizer

    def between(self, one: Sharded) -> None: ...
    def inside(self, one: Sharded) -> AbstractContextManager[Any]:
        return nullcontext()

    def around(self, one: Sharded, micro: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def loss(self, one: Side, loss: Tensor, data: Data, rank: int) -> Tensor:
        """On both sides."""
        return loss

    def scales(self, one: Sharded, loss: Tensor) -> Tensor:
        return loss

    backward: Callable[[Sharded, Tensor, Data], None] | None = None

    def before_step(self, one: Sharded) -> None: ...
    def step(self, one: Sharded) -> bool:
        """Whether it made the optimizer's step."""
        return False

    def ends(self, one: Sharded) -> None: ...
    def resumes(self, one: Sharded) -> None: ...

    # -- of both

    options: Callable[[str, Any], dict[str, Any]] | None = None  # for param_groups
    steps: Callable[[int, int], int] | None = None  # how many steps `rank` of `world_size` has in an epoch

    def drops(self, life: Life, epoch: int, step: int, micro: int) -> bool:
        """Whether the micro-batch fails."""
        return False

    def keeps(self, one: Side, micro: int) -> bool:
        """Whether gradients wait for a later micro-batch."""
        return False

    def worlds(self, first: World) -> list[World]:
        """Those of later chapters."""
        return []

    chunks: bool | None = None  # whether ranks make the loss without logits

    # -- in one process

    def plain_begins(self, one: Plain) -> None: ...
    def plain_optimizer(self, one: Plain, optimizer: Any) -> Any:
        return optimizer

    def plain_between(self, one: Plain) -> None: ...
    def plain_around(self, one: Plain) -> AbstractContextManager[Any]:
        return nullcontext()

    def plain_weight(self, one: Plain) -> float:
        return 1.0

    def plain_before_step(self, one: Plain) -> None: ...
    def plain_step(self, one: Plain) -> bool:
        return False


class Life:
    """What rows ask for, together. `seed`: of all that is left to chance."""

    def __init__(self, rows: Sequence[Row], seed: int = 0, epochs: int = EPOCHS) -> None:
        self.rows, self.seed, self.last = rows, seed, epochs - 1
        asked = {name: value for row in reversed(rows) for name, value in row.fields.items()}  # a field's own row comes first, and wins
        self.policy = ShardingPolicy(**asked)
        self.shape = shaped([row.shape for row in rows])
        self.micros = max([1, *(row.micros for row in rows)])
        self.tolerance = max([1e-9, *(row.tolerance for row in rows)])
        self.uneven = any(row.uneven for row in rows)
        self.parts = max(row.parts for row in rows)
        first = next((row.world for row in rows if row.world), GROUP)
        self.chapters = [first, *(world for row in rows for world in row.worlds(first))]
        self.last += len(self.chapters) - 1

    def dice(self, *what: object) -> random.Random:
        """The same on all ranks, and in one process."""
        return random.Random(f"{self.seed} {what}")

    def epochs(self, chapter: int) -> range:
        return range(self.last + 1) if len(self.chapters) == 1 else [range(self.last - 1), range(self.last - 1, self.last + 1)][chapter]

    def parts_in(self, world: World) -> int:
        return self.parts if world[1] % self.parts == 0 else 1

    def data(self, epoch: int, step: int, micro: int, rank: int, parts: int = 1) -> Data:
        """`parts`: so many ranks hold parts of the same sequences."""
        found = []
        for other in range(rank - rank % parts, rank - rank % parts + parts):
            number = ((epoch * 10 + step) * 10 + micro) * 10 + other
            found.append(Data(1000 * number + self.seed % 1000, 1 + (rank // parts + micro + step) % 3 if self.uneven else 2))
        return replace(found[rank % parts], whole=tuple(found) if parts > 1 else ())

    def drops(self, epoch: int, step: int, micro: int) -> bool:
        return any(row.drops(self, epoch, step, micro) for row in self.rows)

    def chosen(self, name: str) -> Any:
        """What the one row brings that overrides `name`, if one does."""
        return next((found for row in self.rows if (found := getattr(row, name)) is not None), None)

    def options(self, name: str, info: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for row in self.rows:
            found |= row.options(name, info) if row.options is not None else {}
        return found

    @property
    def grouped(self) -> bool:
        return any(row.options is not None for row in self.rows)


class Side:
    """A life as one side leads it."""

    model: Any
    optimizer: Any
    prefix = ""

    def __init__(self, life: Life) -> None:
        self.life, self.epoch, self.step_number, self.finished = life, 0, 0, 0
        self.rank, self.world_size, self.device, self.parts = 0, 1, torch.device("cpu"), 1
        self.shown: dict[tuple[int, str], Tensor] = {}
        self.notes: dict[str, Any] = {}  # what rows remember
        self.stepping: Callable[[], Any] = self.finish

    def each(self, hook: str, *arguments: Any) -> list[Any]:
        return [getattr(row, self.prefix + hook)(self, *arguments) for row in self.life.rows]

    def show(self, what: str, value: Tensor, rank: int | None = None) -> None:
        """What both sides have to agree on. An overflow is an overflow, whatever it looks like."""
        place = f"{what} of epoch {self.epoch}, step {self.step_number}"
        self.shown[self.rank if rank is None else rank, place] = value.detach().double().nan_to_num(77, 77, 77)

    def lead(self, epochs: Sequence[int]) -> None:
        for self.epoch in epochs:
            self.step_number = self.finished = 0
            if self.epoch:
                self.each("between")
            self.train()

    def train(self) -> None:
        raise NotImplementedError

    def prepare(self, model: Any, rank: int, micro: int) -> None:
        for row in self.life.rows:  # ranks that share sequences do the same with them
            row.prepares(self, model, rank - rank % self.parts, micro)

    def measured(self, model: Any, data: Data) -> Tensor:
        """The loss of `model`, plain or sharded."""
        words, numbers = self.inputs(data)
        forward, checkpoint = self.life.chosen("forward"), self.life.chosen("checkpoint")
        targets = data.targets(self.device)
        chunks = forward is None and self.life.chosen("chunks") and isinstance(self, Sharded)

        def compute(words: Tensor, numbers: Tensor) -> Tensor:
            if forward is not None:
                return forward(model, words, numbers)
            model.targets = targets if chunks else None
            try:
                return model(words, numbers)
            finally:
                model.targets = None

        numbers = self.entering(numbers)
        found = compute(words, numbers) if checkpoint is None else checkpoint(compute, words, numbers.requires_grad_())
        if chunks:
            return self.leaving(found)
        found = self.leaving(self.part(found, data))
        return cross_entropy(found.flatten(0, 1), targets) if forward is None else found.pow(2).mean()

    def inputs(self, data: Data) -> tuple[Tensor, Tensor]:
        return data.inputs(self.device)

    def part(self, output: Tensor, data: Data) -> Tensor:
        """A rank's part of an output."""
        return output

    def entering(self, numbers: Tensor) -> Tensor:
        return numbers

    def leaving(self, output: Tensor) -> Tensor:
        return output

    def steps_of(self, rank: int) -> int:
        steps = self.life.chosen("steps")
        return 1 if steps is None else steps(rank, self.world_size)

    def is_ignored(self, name: str, p: Tensor) -> bool:
        ignored = self.life.policy.ignored
        return ignored is not None and ignored(name, p)  # type: ignore[arg-type]

    def finish(self) -> None:
        """All that follows the backwards of a step. Ranks without data do it too."""
        self.step_number, self.finished = self.finished, self.finished + 1
        self.each("before_step")
        if not any(self.each("step")):
            self.optimizer.step()
        self.optimizer.zero_grad()


class Place(NamedTuple):
    """Of one rank."""

    rank: int
    world_size: int
    group: Any
    device: torch.device


class Sharded(Side):
    """One rank."""

    def __init__(self, life: Life, chapter: int, place: Place, model: Model, folder: Path) -> None:
        super().__init__(life)
        self.rank, self.world_size, self.group, self.device = place
        self.parts = life.parts_in(life.chapters[chapter])
        self.folder, self.chapter = folder, chapter
        self.each("builds", model)
        policy = replace(life.policy, offload=folder) if life.policy.offload == FILES else life.policy
        optional = [name for row in life.rows for name in row.optional]
        self.model = zero3.shard(model, optional=optional, process_group=self.group, policy=policy, device=self.device)
        self.each("begins")
        self.make_optimizer()

    def own(self) -> list[nn.Parameter]:
        """What the policy leaves alone."""
        ignored = self.life.policy.ignored
        return [p for name, p in self.model.named_parameters() if ignored is not None and "chunk" not in name]

    def make_optimizer(self) -> None:
        life = self.life
        groups: list[Any] = zero3.param_groups(self.model, life.options) if life.grouped else zero3.get_trainable_chunk(self.model)
        groups = groups if life.grouped else [{"params": groups}]
        if own := self.own():
            groups.append({"params": own})
        self.optimizer = (self.life.chosen("makes") or torch.optim.SGD)(groups, lr=0.05, momentum=0.5)
        for row in life.rows:
            self.optimizer = row.optimizer(self, self.optimizer)

    def train(self) -> None:
        with ExitStack() as stack:
            for row in self.life.rows:
                stack.enter_context(row.inside(self))
            steps = self.steps_of(self.rank)
            for self.step_number in range(steps):
                for micro in range(self.life.micros):
                    self.micro_batch(micro)
                self.stepping()

    def micro_batch(self, micro: int) -> None:
        self.prepare(self.model, self.rank, micro)
        with ExitStack() as stack:
            for row in self.life.rows:
                stack.enter_context(row.around(self, micro))
            data = self.life.data(self.epoch, self.step_number, micro, self.rank, self.parts)
            loss = self.measured(self.model, data)
            for row in self.life.rows:
                loss = row.loss(self, loss, data, self.rank)
            if not self.life.drops(self.epoch, self.step_number, micro):
                self.show(f"the loss of micro-batch {micro}", loss)
            for row in self.life.rows:
                loss = row.scales(self, loss)
            (self.life.chosen("backward") or (lambda one, loss, data: loss.backward()))(self, loss, data)


class Plain(Side):
    """All ranks in one process. It makes the policy's casts and roundings itself."""

    prefix = "plain_"

    def __init__(self, life: Life, device: torch.device) -> None:
        super().__init__(life)
        self.device = device
        self.model = made(life.shape).to(device)
        self.kept: dict[int, dict[str, Tensor]] = {}  # of each rank, what waits for its reduction
        self.now = self.model  # what computes
        self.each("begins")
        kind = life.policy.quantize
        if kind is not None:
            for name, p in self.model.named_parameters():
                if self.is_quantised(name):
                    p.data = kind.dequantize(kind.quantize(p.data), p.dtype)
        self.own = {name: p.dtype for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            if p.requires_grad and not self.is_ignored(name, p):
                p.data = p.data.to(life.policy.master_dtype or p.dtype)
        self.make_optimizer()

    def is_quantised(self, name: str) -> bool:
        return self.life.policy.quantize is not None and is_base(name)

    def is_at_home(self, name: str) -> bool:
        return self.life.policy.expert_parallel and ".experts." in name

    def make_optimizer(self) -> None:
        groups = []
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                options = {} if self.is_ignored(name, p) else self.life.options(name, p)
                groups.append({"params": [p], **{key: value for key, value in options.items() if key not in ("whole", "align")}})
        self.optimizer = (self.life.chosen("makes") or torch.optim.SGD)(groups, lr=0.05, momentum=0.5)
        for row in self.life.rows:
            self.optimizer = row.plain_optimizer(self, self.optimizer)

    def enter(self, world: World) -> None:
        self.world_size, self.shards = max(1, world[0]) * world[1], world[1]
        self.parts = self.life.parts_in(world)

    def inputs(self, data: Data) -> tuple[Tensor, Tensor]:
        """Of whole sequences."""
        words, numbers = zip(*(each.inputs(self.device) for each in data.whole or (data,)), strict=True)
        return torch.cat(words, 1), torch.cat(numbers, 1)

    def part(self, output: Tensor, data: Data) -> Tensor:
        if not data.whole:
            return output
        index = [each.seed for each in data.whole].index(data.seed)
        return output.chunk(len(data.whole), 1)[index]

    def train(self) -> None:
        steps = max(self.steps_of(rank) for rank in range(self.world_size))
        for self.step_number in range(steps):
            for micro in range(self.life.micros):
                if not self.life.drops(self.epoch, self.step_number, micro):
                    self.micro_batch(micro)
            self.reduce()
            self.stepping()

    def seen(self) -> Any:
        """The model as ranks see it while they compute."""
        policy, model = self.life.policy, copy.deepcopy(self.model)
        for name, p in model.named_parameters():
            if self.is_ignored(name, p):
                continue
            if policy.gather_format is not None and p.requires_grad and self.shards > 1 and not self.is_at_home(name):
                p.data = rounded(p.data, policy.gather_format)
            p.data = p.data.to(policy.param_dtype or self.own[name])
        model.zero_grad()
        return model

    def entering(self, numbers: Tensor) -> Tensor:
        policy = self.life.policy
        return numbers.to(policy.param_dtype) if policy.param_dtype is not None and policy.cast_forward_inputs else numbers

    def leaving(self, output: Tensor) -> Tensor:
        return output.to(self.life.policy.output_dtype or output.dtype)

    def ranks(self) -> list[int]:
        """Those that have data in this step."""
        return [rank for rank in range(self.world_size) if self.step_number < self.steps_of(rank)]

    def micro_batch(self, micro: int) -> None:
        for rank in self.ranks():
            data = self.life.data(self.epoch, self.step_number, micro, rank, self.parts)
            self.now = model = self.seen()
            self.prepare(model, rank, micro)
            with ExitStack() as stack:
                for row in self.life.rows:
                    stack.enter_context(row.plain_around(self))
                loss = self.measured(model, data)
                for row in self.life.rows:
                    loss = row.loss(self, loss, data, rank)
                self.show(f"the loss of micro-batch {micro}", loss, rank)
                for row in self.life.rows:
                    loss = loss * row.plain_weight(self)
                loss.backward()
            self.keep(rank, model)
        if not any(row.keeps(self, micro) for row in self.life.rows) and self.life.policy.stage > 1:
            self.reduce()

    def keep(self, rank: int, model: Model) -> None:
        policy, mine = self.life.policy, self.kept.setdefault(rank, {})
        for name, p in model.named_parameters():
            if p.requires_grad and p.grad is not None:
                dtype = p.dtype if self.is_ignored(name, p) else policy.reduce_dtype or p.dtype
                mine[name] = mine.get(name, 0) + p.grad.to(dtype)

    def reduce(self) -> None:
        """Adds up what ranks keep, and joins it to the gradients."""
        policy, kept = self.life.policy, [self.kept[rank] for rank in sorted(self.kept)]
        self.kept = {}
        for name, p in self.model.named_parameters():
            found = [mine[name] for mine in kept if name in mine]
            if found and p.requires_grad:  # what no rank's gradient has reached has none
                parts = [mine.get(name, torch.zeros_like(found[0])) for mine in kept]
                is_sent = self.shards > 1 and not self.is_ignored(name, p) and not self.is_at_home(name)
                if policy.reduce_format is not None and is_sent:
                    parts = [rounded(part, policy.reduce_format).float() for part in parts]
                replicas = [parts[at : at + self.shards] for at in range(0, len(parts), self.shards)]
                total = sum(sum(each) for each in replicas)  # in the order in which ranks add
                total = total / self.world_size if policy.gradient_reduction == "mean" else total
                total = total.to(policy.grad_dtype or p.dtype).to(p.dtype)
                p.grad = total if p.grad is None else p.grad + total

    def gradients(self) -> dict[str, Tensor]:
        """Those that zero3 knows."""
        named = self.model.named_parameters()
        return {name: p.grad for name, p in named if p.grad is not None and not self.is_ignored(name, p)}


def rounded(values: Tensor, kind: Any) -> Tensor:
    """What travels in a format of blocks of one element: the same wherever the blocks begin."""
    flat = values.reshape(1, -1).t().contiguous()  # a column: blocks of Float8 are rows and columns
    return kind.dequantize(kind.quantize(flat), values.dtype).t().reshape(values.shape)


def told(life: Life, device: torch.device) -> Plain:
    """The life in one process, on `device`."""
    plain = Plain(life, device)
    for chapter, world in enumerate(life.chapters):
        plain.enter(world)
        plain.lead(life.epochs(chapter))
    return plain


Launch = Callable[..., list[Any]]  # runs a body on each rank
Body = Callable[[Sharded], Any]  # what a rank tells at the end of a chapter


def shared(life: Life, launch: Launch, folder: Path, body: Body) -> Iterator[list[Any]]:
    """The life on ranks. Yields what `body` returned on each of them, after each chapter."""
    for chapter, world in enumerate(life.chapters):
        size = max(1, world[0]) * world[1]
        models = [made(life.shape, chapter, life.shape.meta) for _ in range(size)]  # here: threads share one generator

        def rank(place: Place) -> Any:
            one = Sharded(life, chapter, place, models[place.rank], folder)  # noqa: B023 (launch waits for it)
            if chapter:  # noqa: B023
                one.each("resumes")
            one.lead(life.epochs(chapter))  # noqa: B023
            if chapter < len(life.chapters) - 1:  # noqa: B023
                one.each("ends")
            return body(one)

        parts = life.parts_in(world)
        yield launch(world, rank, parts=parts) if parts > 1 else launch(world, rank)


def live(life: Life, launch: Launch, folder: Path, device: torch.device | None = None) -> None:
    """Leads the life on both sides, and compares all that was shown, and the parameters of the end. `device`: of the one process; None: the
    CPU.
    """
    expected = told(life, device or torch.device("cpu"))

    def body(one: Sharded) -> Any:
        shown = {place: value.cpu() for place, value in one.shown.items()}  # only now: on a device the host would wait
        last = one.chapter == len(life.chapters) - 1
        return one.rank, shown, zero3.full_state_dict(one.model, rank0_only=False) if last else {}

    for found in shared(life, launch, folder, body):
        for rank, shown, state in found:
            theirs = {place: value.cpu() for place, value in expected.shown.items() if place in shown}
            assert_close(shown, theirs, life.tolerance, f"rank {rank}")
            if rank == 0 and len(life.chapters) == 1:
                assert shown.keys() == {place for place in expected.shown if place[0] == 0}
            if state:
                end = {name: value.cpu() for name, value in expected.model.state_dict().items() if not expected.is_quantised(name)}
                mine = {name: value.cpu() for name, value in state.items() if name in end}
                assert_close(mine, end, life.tolerance, f"parameters on rank {rank}")
