"""Rows that act between two epochs, or between a backward and its step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import zero3
from tests.pairs.life import Plain, Row, Sharded, Side


class Between(Row):
    """Something that is shown between epochs, or between a backward and its step."""

    def shows(self, one: Side, model: Any, rank: int) -> Tensor:
        raise NotImplementedError

    def between(self, one: Sharded) -> None:
        one.show(self.words[0], self.shows(one, one.model, one.rank))

    def plain_between(self, one: Plain) -> None:
        for rank in range(one.world_size):
            one.show(self.words[0], self.shows(one, one.seen(), rank), rank)

    @staticmethod
    def measured(one: Side, model: Any, rank: int, divides: bool = True) -> Tensor:
        one.prepare(model, rank, 9)
        return one.measured(model, one.life.data(one.epoch, 8, 0, rank, one.parts if divides else 1))


class Evaluated(Between):
    divides = True  # whether ranks that share sequences do it here

    def shows(self, one: Side, model: Any, rank: int) -> Tensor:
        with torch.no_grad():
            return self.measured(one, model, rank, self.divides)


class Unwalked(Between):
    """A forward in grad mode, and no backward; between two epochs, and between a backward and its step."""

    def shows(self, one: Side, model: Any, rank: int) -> Tensor:
        return self.measured(one, model, rank)

    def before_step(self, one: Sharded) -> None:
        self.between(one)

    def plain_before_step(self, one: Plain) -> None:
        self.plain_between(one)


class Resident(Evaluated):
    """Ranks evaluate on their own, as often as they like."""

    divides = False

    def between(self, one: Sharded) -> None:
        with zero3.resident(one.model):
            for _ in range(one.rank):
                self.shows(one, one.model, one.rank)
            super().between(one)


class Streamed(Row):
    """Between epochs, and between a backward and its step. Rank 0 gets all; others break off, or hold their iterators."""

    def between(self, one: Sharded) -> None:
        stream = one.notes["stream"] = zero3.stream_weights(one.model)
        for number, (name, tensor) in enumerate(stream):
            one.show(f"{name}, streamed", tensor.clone())
            if number == 2 * one.rank and one.rank:
                break

    def plain_between(self, one: Plain) -> None:
        for name, p in one.model.named_parameters():
            for rank in range(one.world_size):
                one.show(f"{name}, streamed", p.detach().clone(), rank)

    def before_step(self, one: Sharded) -> None:
        self.between(one)

    def plain_before_step(self, one: Plain) -> None:
        self.plain_between(one)


class Parked(Row):
    """Likewise: nothing has changed when all is back."""

    def between(self, one: Sharded) -> None:
        with zero3.parked(one.model, one.optimizer, to="cpu" if one.device.type != "cpu" else one.folder / "parked"):
            for parameter in one.model.parameters():
                parameter.new_empty(parameter.shape)

    def before_step(self, one: Sharded) -> None:
        self.between(one)


class FullParams(Row):
    """Users write."""

    def between(self, one: Sharded) -> None:
        with zero3.full_params(one.model, writeback=True), torch.no_grad():
            self.write(one.model)

    def plain_between(self, one: Plain) -> None:
        with torch.no_grad():
            self.write(one.model)

    @staticmethod
    def write(model: Any) -> None:
        model.norm.bias.add_(0.1)
        model.blocks[1].up.bias.mul_(0.9)
        (model.blocks[0].down.bias if model.blocks[0].first is None else model.blocks[0].first).mul_(1.1)


class Loaded(Row):
    """The full state dict and the optimizer's go out and come back."""

    def between(self, one: Sharded) -> None:
        values, state = zero3.full_state_dict(one.model), zero3.full_optimizer_state_dict(one.model, one.optimizer)
        for chunk in zero3.get_trainable_chunk(one.model):
            chunk.data.mul_(1.5)
        zero3.load_full_state_dict(one.model, values)
        zero3.load_full_optimizer_state_dict(one.model, one.optimizer, state)
