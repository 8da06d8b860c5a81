"""Tries an optimizer on small tensors, to see whether it trains slices of parameters as it trains
the parameters.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.plain_values import kind_of
from ..comm.streams import random_state_kept
from ..guards.unreached import LeftAlone

__all__: list[str] = []

STEPS = 8
# with long tensors: what quantises state may differ in few of their elements, and later
STEPS_LONG = 12
# of the largest change of any element; rounding gives 1e-6, and a norm of another tensor gives 1e-2
# or more
TOLERANCE = 1e-3
_SMALL = ((6, 5), (4,), (3, 4))
# some optimizers treat small tensors differently: 8-bit state begins at 4096 elements
_LARGE = ((65, 97), (64, 96), (4096,))
ALIGNS = (128, 256, 512, 1024, 2048, 4096)  # block lengths that are tried
_LONGEST = 1 << 20  # a larger number among an optimizer's settings is no length
# attributes of every optimizer, which it does not keep as settings
_OF_ALL = ("state", "param_groups", "defaults")
# keys of groups that are no arguments, of ours and of torch's schedules
_NOT_ARGUMENTS = ("whole", "align", "initial_lr", "param_names")
# arguments that optimizers (bitsandbytes' SGD and LARS) keep inside of an option of groups
_KEPT_IN = (("momentum", "betas", 0), ("dampening", "betas", 1))
# ranks may be threads, and torch's generators and its compiler are the process's
_ONE_AT_A_TIME = RLock()
_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
# for each parameter: start and stop in a flat vector, and its shape
Spans = list[tuple[int, int, tuple[int, ...]]]


@contextmanager
def trying(device: torch.device) -> Iterator[None]:
    """Context for steps on small tensors, which leaves random generators as they were. Nothing is
    compiled: torchao compiles each step, for half a minute.
    """
    with (
        _ONE_AT_A_TIME,
        random_state_kept(device),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.compiler.set_stance("force_eager"),  # it acts when it is made
    ):
        yield


class CannotProbe(Exception):
    """A second optimizer of this kind can't be made, or can't make steps on small tensors."""


@dataclass(frozen=True)
class Problem:
    """A quadratic function of each element by itself. It does not depend on how parameters divide
    the elements.

    Its minimum moves at every evaluation. Otherwise optimizers that find it in one step could not
    be told apart.
    """

    start: Tensor
    targets: Tensor  # the minimum for each evaluation; after the last comes the first again
    curvature: Tensor

    @property
    def steps(self) -> int:
        return STEPS if len(self.start) < 4096 else STEPS_LONG

    @classmethod
    def of(cls, numel: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Problem:
        generator = torch.Generator().manual_seed(numel)
        start, curvature, *targets = torch.randn((2 + 7, numel), generator=generator)
        # so that norms of a long tensor's slices tell them apart
        falling = torch.linspace(2.0, 0.2, numel)
        start, targets = start * falling, [target * falling for target in targets]
        made = start, torch.stack(targets), curvature.abs() + 0.1
        return cls(*(each.to(device, dtype) for each in made))


@dataclass(frozen=True)
class Trial:
    """Compares training of parts on `ranks` ranks (1 or 2) with training of whole parameters.

    Each method returns why they differ, or None if they do not. It raises `CannotProbe` if the
    optimizer can't train the small tensors.
    """

    build: Build
    device: torch.device
    ranks: int
    # tensors from this length on may be treated in another way, so slices are tried that are longer
    longest: int = 0

    def flat(self) -> str | None:
        """Of flat slices."""
        longer = max(1, -(-self.longest // 4096))
        large = tuple((*shape[:-1], shape[-1] * longer) for shape in _LARGE)
        # small first: an optimizer that makes matrices of slices fails before it makes large ones
        for shapes in (_SMALL, large):
            reference = _spans(shapes)
            numel = reference[-1][1]
            cuts = [0, numel // 2 - 3, numel] if self.ranks > 1 else [0, numel]
            spread: list[Spans] = [[(low, high, (high - low,))] for low, high in pairwise(cuts)]
            if reason := self._compare(reference, spread):
                return reason
        return None

    def aligned(self, align: int) -> str | None:
        """Of parameters that are cut at multiples of `align` only: one into pieces as short as they
        may be, and others not at all.
        """
        small = _spans(_SMALL)
        uncut: Spans = [(low, high, (high - low,)) for low, high, _ in small]
        # small first, as above: shapes and norms over several parameters show here
        if reason := self._compare(small, self._dealt(uncut)):
            return reason
        # of odd multiples, at odd multiples: longer blocks than `align` must not pass
        long, short = align * (65 + 2 * (max(self.longest, 4096) // align)), 33 * align
        reference = _spans([(long,), (short,), (long + 1,), (4099,)])
        cuts = (0, 16 * align, 33 * align, long, long + 17 * align, long + short)
        pieces = [(low, high, (high - low,)) for low, high in pairwise(cuts)] + reference[2:]
        spread = [pieces[rank::3] for rank in range(3)] if self.ranks > 1 else [reference]
        return self._compare(reference, spread)

    def whole(self, ndims: Sequence[int]) -> str | None:
        """Of parameters of `ndims` dimensions, each whole on one of the ranks."""
        sizes = (5, 4, 3, 2, 2, 2), (3, 6, 2, 2, 2, 2)
        reference = _spans([each[:ndim] for each in sizes for ndim in ndims])
        return self._compare(reference, self._dealt(reference))

    def blocks(self, ndims: Sequence[int]) -> str | None:
        """As `whole`, of parameters that are cut along their first dimension."""
        reference = _spans([(5, *(4, 3, 2, 2, 2)[: ndim - 1]) for ndim in ndims])
        first: Spans = []
        second: Spans = []
        for start, stop, (_, *inner) in reference:
            middle = start + (stop - start) // 5 * 3
            first.append((start, middle, (3, *inner)))
            second.append((middle, stop, (2, *inner)))
        return self._compare(reference, [first, second] if self.ranks > 1 else [reference])

    def _dealt(self, spans: Spans) -> list[Spans]:
        return [spans[rank :: self.ranks] for rank in range(self.ranks)]

    def _compare(self, reference: Spans, spread: Sequence[Spans]) -> str | None:
        problem = Problem.of(reference[-1][1], self.device)
        with trying(self.device):
            try:
                expected, at_last = _trained(self.build, problem, [reference], reference[-1])
            except Exception as error:
                raise CannotProbe(f"{type(error).__name__}: {error}") from error
            try:
                found, found_at_last = _trained(self.build, problem, spread, reference[-1])
            except Exception as error:
                return f"it raises {type(error).__name__}: {error}"
        moved = (expected - problem.start).abs().max()
        if not torch.isfinite(expected).all() or not moved > 0:
            raise CannotProbe(f"in {problem.steps} steps it moved nothing, or to where numbers end")
        off = ((found - expected).abs().max() / moved).item()
        if not off < TOLERANCE:
            return f"after {problem.steps} steps elements differ by {off:.1%} of the largest change"
        if at_last is None:  # it can't step without a gradient, unsharded neither
            return None
        if found_at_last is None or not (found_at_last - at_last).abs().max() / moved < TOLERANCE:
            return "a step differs in which no gradient reaches one of the parameters"
        return None


def fitting(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], device: torch.device
) -> dict[str, Any] | None:
    """Returns the options of `param_groups` under which an optimizer is exact on several ranks: the
    smallest `align` of a few, or `whole`. An empty dict: flat chunks are, or nothing is. None: it
    can't be tried.
    """
    trial = Trial(builder(optimizer, group), device, 2, longest(optimizer, group))
    try:
        if trial.flat() is None:
            return {}
        for align in ALIGNS:
            if trial.aligned(align) is None:
                return {"align": align}
    except CannotProbe:  # as Muon, which takes matrices only
        pass
    try:
        ndims = sorted({each.ndim for each in group["params"]})
        return {"whole": True} if trial.whole(ndims) is None else {}
    except CannotProbe:
        return None


def builder(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Build:
    """Returns a function that makes optimizers like `optimizer`, with the options of `group`, which
    is one of its groups.

    Not all arguments of a constructor are options of groups: bitsandbytes keeps `optim_bits` and
    others as attributes. So the new optimizers get such attributes of `optimizer` too.
    """
    kind, options = type(optimizer), {key: value for key, value in group.items() if key != "params"}
    if isinstance(rate := options.get("lr"), (int, float, Tensor)) and not rate:
        # a warm-up begins at 0, and steps that change nothing show nothing
        began = float(group.get("initial_lr") or 0.01)
        options["lr"] = torch.full_like(rate, began) if isinstance(rate, Tensor) else began
    accepted = inspect.signature(kind.__init__).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    own = {
        key: value
        for key, value in vars(optimizer).items()
        if key not in _OF_ALL and _picture(value) is not None
    }
    given = {key: value for key, value in own.items() if key in accepted}
    given |= {
        key: value
        for key, value in {**optimizer.defaults, **options}.items()
        if key in accepted or (anything and key not in _NOT_ARGUMENTS)
    }
    for key, kept_as, place in _KEPT_IN:
        if key in accepted and key not in given and kept_as in options:
            given[key] = options[kept_as][place]
    settings: dict[str, Any] = {}

    def build(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made = kind(parameters, **copy.deepcopy(given))
        made.param_groups[0].update(copy.deepcopy(options))
        vars(made).update(copy.deepcopy(settings))
        if hasattr(manager := getattr(made, "mng", None), "index2config"):
            # bitsandbytes' table of what it was told of parameters by their places in groups
            made.mng = copy.copy(manager)  # type: ignore[attr-defined]
            made.mng.index2config = {}  # type: ignore[attr-defined]
        return made

    devices = (parameter.device for parameter in group["params"])
    settings |= _settings(build, own, next(devices, torch.device("cpu")))
    return build


def longest(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> int:
    """The largest of an optimizer's settings that may be a length, as of blocks."""
    settings = {**vars(optimizer), **group}.items()
    pictures = [_picture(value) for key, value in settings if key not in (*_OF_ALL, "params")]
    return max((number for number in _numbers(pictures) if number <= _LONGEST), default=0)


def _settings(build: Build, own: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Those attributes in `own` that the constructor sets in another way, and that are settings.

    What a step changes is a count or a cache. What differs between other parameters is about them.
    """
    shapes, others = _SMALL[:1], _SMALL[1:]
    try:
        made, another = (
            build([nn.Parameter(torch.zeros(shape, device=device)) for shape in each])
            for each in (shapes, others)
        )
        fresh = {key: _picture(value) for key, value in vars(made).items()}
        found = {key for key, value in own.items() if fresh.get(key) not in (None, _picture(value))}
        found = {key for key in found if _picture(vars(another).get(key)) == fresh[key]}
        if found:
            spans = _spans(shapes)
            problem, parameters = Problem.of(spans[-1][1], device), made.param_groups[0]["params"]
            with trying(device):
                for _ in _steps(made, parameters, problem, spans):
                    pass
        return {key: own[key] for key in found if _picture(vars(made).get(key)) == fresh[key]}
    except Exception:  # of any kind, and whoever tries the optimizer sees it again
        return {}


def _picture(value: object) -> object:
    """What can be compared of a value that is nothing but data; None if it holds something else
    (parameters, modules, functions).
    """
    try:
        return _pictured(value)
    except (TypeError, RecursionError):
        return None


def _pictured(value: Any) -> object:
    if isinstance(value, _PLAIN):
        return type(value), value
    if type(value) is Tensor and value.numel() <= _LONGEST and not value.requires_grad:
        return value.dtype, tuple(value.shape), value.tolist()
    if isinstance(value, Mapping):
        return [(key, _pictured(each)) for key, each in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [_pictured(each) for each in value]
    if (
        callable(value)
        or isinstance(value, Tensor | torch.optim.Optimizer)
        or not hasattr(value, "__dict__")
    ):
        raise TypeError(type(value).__name__)
    return type(value), _pictured(vars(value))


def _numbers(picture: object) -> Iterator[int]:
    """The whole numbers in a picture, but for those in tensors, which are no settings."""
    if isinstance(picture, tuple) and len(picture) == 2 and picture[0] is int:
        yield picture[1]
    elif isinstance(picture, list | tuple):
        for each in picture:
            yield from _numbers(each)


def kind_in_state(value: Any, ndim: int) -> str:
    """What a value in the state of a parameter with `ndim` dimensions is."""
    if not isinstance(value, Tensor) or not value.dim():
        return "text" if isinstance(value, str) else "number"
    apart = value.dim() != ndim
    return kind_of(value.dtype) + (f" with {value.dim()} dimensions" if apart else "")


def state_keys(
    build: Build, device: torch.device, dtype: torch.dtype, shapes: Iterable[tuple[int, ...]]
) -> list[dict[str, str]]:
    """Finds the keys that an optimizer keeps for a parameter of `dtype` and each of `shapes`, after
    each of its first steps.

    Returns:
        Dicts of keys and the kinds of their numbers. There may be several, because some keys come
        with a later step, or for large tensors only. There are none if the optimizer can't make
        steps.
    """
    found: list[dict[str, str]] = []
    with trying(device):
        for shape in shapes:
            problem = Problem.of(torch.Size(shape).numel(), device, dtype)
            try:
                parameter = nn.Parameter(problem.start.clone().view(shape))
                optimizer = build([parameter])
                for _ in _steps(optimizer, [parameter], problem, _spans([shape])):
                    state = optimizer.state.get(parameter, {})
                    found.append({k: kind_in_state(v, len(shape)) for k, v in state.items()})
            except Exception:  # of any kind, since the optimizer may be of any library
                return []
    return [kept for number, kept in enumerate(found) if kept not in found[:number]]


def _trained(
    build: Build, problem: Problem, spread: Sequence[Spans], unreached: tuple[int, int, Any]
) -> tuple[Tensor, Tensor | None]:
    """Returns the elements after some steps, with one optimizer for each of the `spread` spans, and
    after one more in which no gradient reaches the elements of `unreached`: None if that raises.
    """
    result = problem.start.clone()
    last: Tensor | None = problem.start.clone()
    for spans in spread:
        parameters = [
            nn.Parameter(problem.start[low:high].clone().view(shape)) for low, high, shape in spans
        ]
        optimizer = build(parameters)
        for _ in _steps(optimizer, parameters, problem, spans):
            pass
        _write(result, parameters, spans)
        try:
            _step_without(optimizer, parameters, spans, unreached)
        except Exception:  # of any kind, since the optimizer may be of any library
            last = None
        if last is not None:
            _write(last, parameters, spans)
    return result, last


def _write(result: Tensor, parameters: list[nn.Parameter], spans: Spans) -> None:
    for parameter, (low, high, _) in zip(parameters, spans, strict=True):
        result[low:high] = parameter.detach().reshape(-1)


def _step_without(
    optimizer: torch.optim.Optimizer,
    parameters: list[nn.Parameter],
    spans: Spans,
    unreached: tuple[int, int, Any],
) -> None:
    """Makes a step, with the last gradients, as chunks are stepped."""
    beside: dict[int, list[slice]] = {}
    for parameter, (low, high, _) in zip(parameters, spans, strict=True):
        start, stop = max(low, unreached[0]), min(high, unreached[1])
        if (start, stop) == (low, high):
            parameter.grad = None
        elif start < stop and parameter.grad is not None:
            beside[id(parameter)] = [slice(start - low, stop - low)]
            parameter.grad[start - low : stop - low] = 0
    left = LeftAlone()
    left.put_aside(optimizer, beside)
    _step(optimizer, lambda: 0.0)
    left.put_back(optimizer)


def _step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> None:
    """Not all optimizers take a closure."""
    if "closure" in inspect.signature(optimizer.step).parameters:
        optimizer.step(closure)
    else:
        optimizer.step()


def _steps(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], problem: Problem, spans: Spans
) -> Iterator[int]:
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
            loss += (slope * away.conj()).sum() / 2
        return loss.real

    if callable(begin := getattr(optimizer, "train", None)):
        begin()  # schedule-free ones step after this alone
    for number in range(problem.steps):
        closure()  # also for an optimizer that takes a closure and ignores it
        _step(optimizer, closure)
        yield number


def _spans(shapes: Sequence[tuple[int, ...]]) -> Spans:
    spans, at = [], 0
    for shape in shapes:
        spans.append((at, at + torch.Size(shape).numel(), shape))
        at = spans[-1][1]
    return spans
