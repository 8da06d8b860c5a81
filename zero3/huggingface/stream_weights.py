"""stream_weights(): a model's weights by the names of its files, for an engine that generates."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any, NoReturn, overload

import torch
from torch import Tensor, nn

from ..checkpoint.contents import Contents
from ..checkpoint.extra_state import extra_states_of
from ..checkpoint.full_state import check_dtype
from ..comm.agreement import NOTE_BYTES, Members, agree
from ..comm.mesh import shards_of
from ..comm.plain_values import integer, unreadable
from ..conductors.conducted import unconducted
from ..core.collectives import Collective
from ..core.layer_state import LayerState
from ..door import Door, used_between
from ..names import innermost
from ..optim.state_memory import land_steps
from .merging import named_without_adapters, refuse_part_with_adapters
from .outputs import Output, has_adapters, outputs_of_adapter, outputs_of_model, sources_of
from .weights import WeightWalk

__all__: list[str] = []

_ALIGNED = 16  # bytes: at multiples of it tensors of any dtype may begin
_NOTED = 8 * NOTE_BYTES  # ranks tell each other which chunks have changed, by number modulo this

Named = tuple[str, Tensor]


@overload
def stream_weights(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    merge_adapters: bool = False,
    adapters_only: bool = False,
    max_bytes: None = None,
) -> Generator[Named, None, None]: ...


@overload
def stream_weights(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    merge_adapters: bool = False,
    adapters_only: bool = False,
    max_bytes: int,
) -> Generator[list[Named], None, None]: ...


def stream_weights(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    merge_adapters: bool = False,
    adapters_only: bool = False,
    max_bytes: int | None = None,
) -> Generator[Any, None, None]:
    """Yields the weights of a sharded model as its files would have them, each tensor whole, one
    layer after another.

    Every rank calls it, and gets the same tensors in the same order: with the names and the bits
    that `save_pretrained` writes, or `save_merged`, or of an adapter's file; contiguous, on the
    device on which the model computes, ready on the current stream. A layer is gathered once. No
    rank holds more than two layers (one with `prefetch_depth=0`), and what it yields. Parameters,
    gradients and everything else of the model stay as they are.

    A tensor is valid until the next one is asked for: copy what you keep. A rank that stops early
    (`close()`, `break`, an exception) takes part in all remaining transfers, so that the others get
    everything. A rank that still holds its iterator does so when it uses the model next; then the
    iterator is over. If it does nothing more, the others raise at the group's timeout. On a mesh of
    replicas one replica may stream alone.

    Args:
        model: Any model that contains zero3 layers.
        dtype: A floating dtype of 16 bits or more; floating tensors are converted to it. None: the
            dtypes of the files.
        merge_adapters: Yields what `save_merged` writes: adapters merged into the weights of their
            base. The layer that holds the adapters of others stays gathered to the end.
        adapters_only: Yields the active adapter alone, as in `adapter_model.safetensors`.
        max_bytes: Yields lists of tensors, of at most so many bytes together, or one larger tensor
            alone. They are valid until the next list is asked for. None: yields single tensors.

    Returns:
        A generator of (name, tensor), or of lists of them.

    Raises:
        ValueError: Nothing in `model` is sharded, `max_bytes` is less than 1, or ranks differ. A
            model with adapters needs `merge_adapters` or `adapters_only`, and one without has
            neither; both together, several active adapters with `adapters_only`, and kinds of
            adapters that have no merge, are refused too. So are adapters that peft refuses to merge
            (a RuntimeError, if it is one of peft's). All ranks raise it, at the call.
        TypeError: `dtype` is no dtype, or `max_bytes` no integer. Likewise.
        RuntimeError: It is called inside a forward or a backward, or in `full_params`, `resident`
            or `parked`; parameters have no values; or a tensor is asked for after the model was
            used. Or a transfer failed.
        OSError: With `offload=DIR` a rank's disk has lost what a step has changed.

    Example::

        for name, tensor in zero3.stream_weights(model, dtype=torch.bfloat16):
            if rank == 0:
                engine.load_weight(name, tensor)
    """
    states = used_between(model, "stream_weights")
    first, error = states[0], None
    lines, stays, stale = [f"the model of {first.name_among_ranks}"], [], 0
    lines += [f"{dtype}, {merge_adapters}, {adapters_only}, {max_bytes}"]
    try:
        _check_max_bytes(max_bytes)
        check_dtype(dtype)
        land_steps(states)
        options = {"merge_adapters": merge_adapters, "adapters_only": adapters_only}
        walk = walk_of(model, dtype, [name for name, chosen in options.items() if chosen])
        lines += [output.line for output in walk.outputs]
        stays = walk.stays()
        for number, chunk in enumerate(stays):
            stale |= bool(chunk.is_stale()) << number % _NOTED
    except Exception as caught:  # of any kind: the other ranks wait to hear of it
        error = caught
    ranks, note = shards_of(unconducted(first.communicator)), stale.to_bytes(NOTE_BYTES)
    for each in agree(Members(ranks, first.device), "stream_weights", lines, error, note=note):
        stale |= int.from_bytes(each)
    walk.find(c for number, c in enumerate(stays) if not stale >> number % _NOTED & 1)
    return _Stream(walk, max_bytes, states, first.device)


def walk_of(model: nn.Module, dtype: torch.dtype | None, options: Sequence[str]) -> WeightWalk:
    """What is streamed. It makes no collective. `options`: those that are on, by name."""
    owner: Any = innermost(model)
    if not has_adapters(owner):
        refuse_part_with_adapters(owner)
    _check_choice(options, adapted=has_adapters(owner))
    adapters_only = "adapters_only" in options
    contents = Contents(model, "stream_weights", as_values=not adapters_only)
    modules: Sequence[nn.Module] = ()
    encoder: tuple[Any, str] = (None, "")
    if adapters_only:
        if len(active := list(owner.active_adapters)) != 1:
            raise ValueError(
                f"stream_weights(adapters_only=True): {len(active)} adapters are active "
                f"({', '.join(active)}), expected one: choose it by set_adapter"
            )
        encoder = owner, active[0]
        outputs = outputs_of_adapter(*encoder, contents, dtype)
    else:
        extra: dict[str, Tensor] = {}
        if options:
            owner, modules = named_without_adapters(contents, owner)
        elif not any(sharded.chunk.read_only for sharded in contents.parameters.values()):
            found = extra_states_of(model).items()  # save_merged leaves it out
            extra = {name: value for name, value in found if unreadable(value) is None}
        contents.others.update(extra)
        outputs = outputs_of_model(owner, contents, extra, dtype)
    contents.check_loaded(sources_of(outputs), "stream_weights")
    return WeightWalk(contents, outputs, modules, encoder=encoder)


def _check_choice(options: Sequence[str], *, adapted: bool) -> None:
    if len(options) > 1:
        raise ValueError("stream_weights(merge_adapters=True, adapters_only=True): choose one")
    if options and not adapted:
        raise ValueError(
            f"stream_weights({options[0]}=True) of a model without adapters: leave it out"
        )
    if adapted and not options:
        raise ValueError(
            "stream_weights of a model with adapters: choose merge_adapters=True, which yields the "
            "whole model with the adapters merged into it, or adapters_only=True"
        )


def _check_max_bytes(max_bytes: int | None) -> None:
    if max_bytes is None:
        return
    if integer(max_bytes) is None:
        raise TypeError(f"max_bytes must be a number of bytes or None, found {max_bytes!r}")
    if max_bytes < 1:
        raise ValueError(f"max_bytes must be at least 1, found {max_bytes}")


def _buckets(layers: Sequence[Sequence[Output]], max_bytes: int | None) -> list[list[Output]]:
    """One tensor each, or, in order, as many as fit. One that is half full ends with its layer: no
    tensor has to be copied before the next layer is read.
    """
    buckets: list[list[Output]] = []
    room = -1
    for layer in layers:
        if 2 * room < (max_bytes or 0):
            room = -1
        for output in layer:
            room -= output.nbytes
            if room < 0 or max_bytes is None:
                buckets.append([])
                room = (max_bytes or 0) - output.nbytes
            buckets[-1].append(output)
    return buckets


class _YieldedMemory:
    """What is yielded lies in it, and is overwritten by what is yielded next: so it is no more than
    the largest of them, also if the caller still holds the last one.
    """

    def __init__(self, buckets: Iterable[Iterable[Output]], device: torch.device) -> None:
        self._nbytes = max((sum(map(_aligned, bucket)) for bucket in buckets), default=0)
        self._device, self._used = device, 0
        self._flat: Tensor | None = None

    def clear(self) -> None:
        self._used = 0

    def part(self, output: Output) -> Tensor:
        """Flat."""
        if self._flat is None:
            self._flat = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
        start, self._used = self._used, self._used + _aligned(output)
        return self._flat[start : start + output.nbytes].view(output.dtype)


def _aligned(output: Output) -> int:
    return -(-output.nbytes // _ALIGNED) * _ALIGNED


class _Stream(Generator[Any, None, None]):
    """At its end, or before the model is used, this rank takes part in what is left of the walk."""

    _is_over = True

    def __init__(
        self,
        walk: WeightWalk,
        max_bytes: int | None,
        states: Sequence[LayerState],
        device: torch.device,
    ) -> None:
        self.outputs = walk.outputs
        self._tensors = walk.tensors(ahead=min(1, states[0].policy.prefetch_depth))
        buckets = _buckets(walk.layers, max_bytes)
        self._left, self._single = iter(buckets), max_bytes is None
        # what lies with earlier layers is overwritten while a bucket is filled
        self._in_place = walk.in_place(buckets)
        copied = [[o for o in bucket if o.name not in self._in_place] for bucket in buckets]
        self._memory: _YieldedMemory | None = _YieldedMemory(copied, device)
        self._ended_by = ""
        self._is_over = False
        # the layers hold no stream: one that is dropped ends at once
        self._door = Door(states, partial(_give_way, weakref.ref(self)))

    def send(self, value: object) -> Any:
        if self._ended_by:
            raise RuntimeError(
                f"stream_weights: on this rank the model {self._ended_by}, and that has ended this "
                "stream. Begin another one"
            )
        if self._is_over:
            raise StopIteration
        bucket = next(self._left, None)
        try:
            if bucket is not None and self._memory is not None:
                found = self._filled(bucket, self._memory)
                return found[0] if self._single else found
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopIteration

    def _filled(self, bucket: Sequence[Output], memory: _YieldedMemory) -> list[Named]:
        found: list[Named] = []
        memory.clear()
        # the caller may be inside of inference_mode now, and outside when they are overwritten
        with torch.inference_mode(False), torch.no_grad():
            for output, fill, as_read in islice(self._tensors, len(bucket)):
                needs_none = len(bucket) == 1 or output.name in self._in_place
                if (tensor := as_read() if needs_none else None) is None:
                    tensor = memory.part(output)
                    fill(tensor, 0)
                found.append((output.name, tensor.view(output.shape)))
        return found

    def close(self) -> None:
        """Takes part in what is left. The generator is over."""
        self.finish("")

    def finish(self, by: str) -> None:
        if self._is_over:
            return
        self._is_over, self._ended_by, self._memory = True, by, None
        self._door.open()
        with torch.inference_mode(False), torch.no_grad():
            for _ in self._tensors:
                pass

    def throw(self, kind: Any, value: Any = None, trace: Any = None) -> NoReturn:
        self.close()
        raise kind if value is None else value

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:  # another rank is gone: its own error says why
            return


def _give_way(stream: weakref.ref[_Stream], what: Collective) -> None:
    if (found := stream()) is not None:
        found.finish(str(what))
