"""Clipping of gradients that rest in files: one after another is in memory, and only if it has to
be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..core.chunk import Chunk, Part
from ..core.layer_state import LayerState, chunks_of
from ..stores.files import Files, spans
from ..stores.untouched import Span, changed, known_norm, norm_of, to_bring
from .state_memory import is_stepped_in_turns

__all__: list[str] = []

Norms = Mapping[tuple[Chunk, Span], Tensor]  # by elements of chunks


class GradientInFile(NamedTuple):
    """A gradient in a file."""

    chunk: Chunk
    store: Files
    part: Part
    gradient: Tensor

    def bring(self, to_write: bool) -> None:
        self.store.bring(to_bring(self.gradient)[0], to_write=to_write)

    def known_norms(self, order: float) -> dict[Span, Tensor] | None:
        norms = {
            span: known_norm(self.gradient, span, order) for span in spans(self.chunk, self.part)
        }
        found = {span: norm for span, norm in norms.items() if norm is not None}
        return found if len(found) == len(norms) else None

    def norms(self, order: float) -> dict[Span, Tensor]:
        values = self.gradient.as_subclass(Tensor)
        return {span: norm_of(values, span, order) for span in spans(self.chunk, self.part)}


def gradients_in_files(states: list[LayerState]) -> list[GradientInFile]:
    return [
        GradientInFile(chunk, chunk.store, part, gradient)
        for chunk in chunks_of(states)
        if isinstance(chunk.store, Files)
        for part in chunk.parts
        if (gradient := part.parameter.grad) is not None and gradient.numel()
    ]


def norms_in_files(gradients: list[GradientInFile], order: float) -> Norms:
    """Their norms. From now on norms are taken when gradients land, so that gradients need not come
    for them.
    """
    known = [each.known_norms(order) for each in gradients]
    unknown = [each for each, norms in zip(gradients, known, strict=True) if norms is None]
    taken = iter([each.norms(order) for each in _one_by_one(unknown, to_write=False)])
    found: dict[tuple[Chunk, Span], Tensor] = {}
    for each, norms in zip(gradients, known, strict=True):
        each.store.take_norms(order)
        for (start, stop), norm in (next(taken) if norms is None else norms).items():
            found[each.chunk, (each.part.start + start, each.part.start + stop)] = norm
    return found


def scale_in_files(gradients: list[GradientInFile], max_norm: float, total: Tensor) -> None:
    """Multiplies them by what `clip_grads_with_norm_` of torch would."""
    one = nn.Parameter(torch.ones_like(total))
    one.grad = torch.ones_like(total)
    torch.nn.utils.clip_grads_with_norm_(one, max_norm, total)
    factor = one.grad.cpu()  # from an accelerator the host waits for it
    if factor.item() == 1:
        for each in gradients:
            changed(each.gradient)
        return
    now = [
        each
        for each in gradients
        if not (
            is_stepped_in_turns(each.part.parameter) and each.store.scale_later(each.part, factor)
        )
    ]
    for each in _one_by_one(now, to_write=True):
        each.gradient.mul_(factor)


def _one_by_one(gradients: Sequence[GradientInFile], *, to_write: bool) -> Iterator[GradientInFile]:
    """Yields each when it is in memory, while a thread brings the next one and others leave."""
    with ThreadPoolExecutor(1, thread_name_prefix="zero3-offload") as thread:
        coming = [thread.submit(each.bring, to_write) for each in gradients[:1]]
        for each, following in zip(gradients, [*gradients[1:], None], strict=False):
            here = coming.pop()
            if following is not None:
                coming.append(thread.submit(following.bring, to_write))
            here.result()
            yield each
            if following is None or following.chunk is not each.chunk:
                thread.submit(each.store.rest_gradients)
