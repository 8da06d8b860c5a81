"""Whether an optimizer's maths bears being spread over ranks: tried out on a few small tensors, not looked up by name."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.plain_values import kind_of
from ..comm.streams import random_state_kept

__all__: list[str] = []

STEPS = 4
TOLERANCE = 1e-3  # of the largest change of any element: rounding gives 1e-6, a norm of another tensor 1e-2 and more
_SMALL = ((6, 5), (4,), (3, 4))
_LARGE = ((64, 96), (4096,))  # for optimizers that treat small tensors otherwise: 8-bit state begins at 4096 elements

Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Spans = list[tuple[int, int, tuple[int, ...]]]  # start and stop in a flat vector, and the shape of a parameter made of it


class CannotProbe(Exception):
    """The optimizer can't be made anew, or does not step, on its own."""


@dataclass(frozen=True)
class Problem:
    """A quadratic function of each element by itself, the same however the elements are laid out.

    Its target moves at every look, or optimizers that find the minimum at once would all agree on it.
    """

    start: Tensor
    targets: Tensor  # one a look
    curvature: Tensor

    @classmethod
    def of(cls, numel: int, device: torch.device) -> Problem:
        generator = torch.Generator().manual_seed(numel)
        start, curvature, *targets = torch.randn((2 + 7, numel), generator=generator)
        return cls(start.to(device), torch.stack(targets).to(device), (curvature.abs() + 0.1).to(device))


def probe_flat(build: Build, device: torch.device, ranks: int) -> str | None:
    """Why flat slices of parameters on `ranks` ranks (1 or 2) would be trained in another way than the parameters; None: they would not."""
    for shapes in (_SMALL, _LARGE):  # what makes matrices of a slice is found by the small ones, before it makes large ones
        reference = _spans(shapes)
        numel = reference[-1][1]
        cuts = [0, numel // 2 - 3, numel] if ranks > 1 else [0, numel]
        spread: list[Spans] = [[(low, high, (high - low,))] for low, high in pairwise(cuts)]
        if reason := _compare(build, Problem.of(numel, device), reference, spread):
            return reason
    return None


def probe_whole(build: Build, device: torch.device, ranks: int, ndims: Sequence[int]) -> str | None:
    """The same for whole parameters of these dimensions, dealt out to `ranks` ranks."""
    shapes = [tuple((5, 4, 3, 2, 2, 2)[:ndim]) for ndim in ndims] + [tuple((3, 6, 2, 2, 2, 2)[:ndim]) for ndim in ndims]
    reference = _spans(shapes)
    spread = [reference[rank::ranks] for rank in range(ranks)]
    return _compare(build, Problem.of(reference[-1][1], device), reference, spread)


def builder(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Build:
    """Makes optimizers like `optimizer`, with the options of `group` (one of its own)."""
    kind, options = type(optimizer), {key: value for key, value in group.items() if key != "params"}
    if isinstance(options.get("lr"), (int, float)) and not options["lr"]:
        options["lr"] = group.get("initial_lr") or 0.01  # a schedule's first step would change nothing, and show nothing
    accepted = inspect.signature(kind.__init__).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    given = {key: value for key, value in {**optimizer.defaults, **options}.items() if key in accepted or anything}

    def build(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made = kind(parameters, **copy.deepcopy(given))
        made.param_groups[0].update(copy.deepcopy(options))
        return made

    return build


def state_keys(build: Build, device: torch.device, shapes: Iterable[tuple[int, ...]]) -> list[dict[str, str]]:
    """What an optimizer keeps for a parameter of one of these shapes after each of its first steps: keys, and the kinds of their numbers.

    Some keys come with a later step, or for large tensors only, so there may be several answers. None of them: it can't be tried out.
    """
    found: list[dict[str, str]] = []
    with random_state_kept(device), torch.inference_mode(False), torch.enable_grad():
        for shape in shapes:
            problem = Problem.of(torch.Size(shape).numel(), device)
            parameter = nn.Parameter(problem.start.clone().view(shape))
            try:
                optimizer = build([parameter])
                for _ in _steps(optimizer, [parameter], problem, _spans([shape])):
                    state = optimizer.state.get(parameter, {})
                    found.append({k: kind_of(v.dtype) if isinstance(v, Tensor) else "number" for k, v in state.items()})
            except Exception:  # whatever an optimizer asks for that is not here
                return []
    return [kept for number, kept in enumerate(found) if kept not in found[:number]]


def _compare(build: Build, problem: Problem, reference: Spans, spread: Sequence[Spans]) -> str | None:
    with random_state_kept(problem.start.device), torch.inference_mode(False), torch.enable_grad():
        try:
            expected = _trained(build, problem, [reference])
        except Exception as error:
            raise CannotProbe(f"{type(error).__name__}: {error}") from error
        try:
            found = _trained(build, problem, spread)
        except Exception as error:
            return f"it raises {type(error).__name__}: {error}"
    moved = (expected - problem.start).abs().max()
    if not torch.isfinite(expected).all() or not moved > 0:
        raise CannotProbe(f"in {STEPS} steps it moved nothing, or to where numbers end")
    off = ((found - expected).abs().max() / moved).item()
    return None if off < TOLERANCE else f"after {STEPS} steps elements differ by {off:.1%} of the largest change"


def _trained(build: Build, problem: Problem, spread: Sequence[Spans]) -> Tensor:
    """The elements after some steps, by one optimizer for each of the `spread` spans."""
    result = problem.start.clone()
    for spans in spread:
        parameters = [nn.Parameter(problem.start[low:high].clone().view(shape)) for low, high, shape in spans]
        for _ in _steps(build(parameters), parameters, problem, spans):
            pass
        for parameter, (low, high, _) in zip(parameters, spans, strict=True):
            result[low:high] = parameter.detach().reshape(-1)
    return result


def _steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], problem: Problem, spans: Spans) -> Iterator[int]:
    """Yields after each step."""
    looks = 0

    def closure() -> Tensor:
        nonlocal looks
        loss, target = problem.start.new_zeros(()), problem.targets[looks % len(problem.targets)]
        looks += 1
        for parameter, (low, high, shape) in zip(parameters, spans, strict=True):
            away = parameter.detach() - target[low:high].view(shape)
            slope = problem.curvature[low:high].view(shape) * away
            parameter.grad = slope
            loss += (slope * away).sum() / 2
        return loss

    takes_closure = "closure" in inspect.signature(optimizer.step).parameters
    for number in range(STEPS):
        closure()  # for those that ignore theirs, too
        if takes_closure:
            optimizer.step(closure)  # type: ignore[arg-type]  # torch's own take and return tensors
        else:
            optimizer.step()
        yield number


def _spans(shapes: Sequence[tuple[int, ...]]) -> Spans:
    spans, at = [], 0
    for shape in shapes:
        spans.append((at, at + torch.Size(shape).numel(), shape))
        at = spans[-1][1]
    return spans
