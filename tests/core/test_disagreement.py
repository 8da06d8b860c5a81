"""Bad input: the same named error on every rank, in seconds, with nothing changed, whichever rank is wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero3
from tests.support.processes import PROMPT, Rank, on_ranks
from tests.support.ranks import ThreadCommunicator, World, run_ranks
from zero3 import Zero3Layer, Zero3Sequential

# What each mistake is: called with the rank and with a module that must survive it. `alone` makes the mistake on rank 1
# only, so that rank 0 sees nothing wrong by itself.


class Mistake(NamedTuple):
    make: Callable[[bool, Rank, nn.Module], object]  # (whether this rank is wrong, its rank, its module)
    kind: str
    says: tuple[str, ...]  # regular expressions: what was found, what was expected, what to do


def _wrap(**wrong: Any) -> Callable[[bool, Rank, nn.Module], object]:
    return lambda is_wrong, rank, module: Zero3Layer(module, **(wrong if is_wrong else {}))


def _wrap_changed(change: Callable[[nn.Module], object]) -> Callable[[bool, Rank, nn.Module], object]:
    def make(is_wrong: bool, rank: Rank, module: nn.Module) -> object:
        if is_wrong:
            change(module)
        return Zero3Layer(module)

    return make


def _other_rank(is_wrong: bool, rank: Rank, module: nn.Module) -> object:
    return Zero3Layer(module, (rank.number + 1) % rank.world_size if is_wrong else rank.number, rank.world_size)


def _layer() -> Zero3Layer:
    return Zero3Layer(nn.Linear(2, 2))


def _wrap_twice(is_wrong: bool, rank: Rank, module: nn.Module) -> object:
    layer = _layer()
    return Zero3Layer(layer if is_wrong else module)


def _wrap_again(is_wrong: bool, rank: Rank, module: nn.Module) -> object:
    wrapped = nn.Linear(3, 5)
    Zero3Layer(wrapped)
    return Zero3Layer(wrapped if is_wrong else module)


def _overlap(module: nn.Module) -> None:
    module.extra = nn.Parameter(torch.zeros(1).expand(4))


def _jit(compiled: Callable[[nn.Module], nn.Module], shard: Callable[[nn.Module], object]) -> Callable[[bool, Rank, nn.Module], object]:
    def make(is_wrong: bool, rank: Rank, module: nn.Module) -> object:
        with warnings.catch_warnings():
            for kind in (DeprecationWarning, FutureWarning):  # torch's own, of another kind from 2.15 on
                warnings.simplefilter("ignore", kind)
            return shard(nn.Sequential(compiled(module) if is_wrong else module))

    return make


_INSTEAD = ("shard the module before torch.jit", "torch.compile")


class Subclass(Tensor):
    pass


def _subclassed(module: nn.Module) -> None:
    module.bias = nn.Parameter(module.bias.detach().as_subclass(Subclass))


MISTAKES = {
    "rank": Mistake(_other_rank, "ValueError", ("rank=", "process group says", "rank=None")),
    "world_size": Mistake(_wrap(world_size=7), "ValueError", ("world_size=7", "process group says 2", "world_size=None")),
    "rank of wrong type": Mistake(_wrap(rank="0"), "TypeError", ("rank must be an integer", "found '0'")),
    "bool for a rank": Mistake(_wrap(rank=True), "TypeError", ("rank must be an integer", "found True")),
    "dtype": Mistake(_wrap(dtype=torch.float64), "ValueError", ("'weight'", "float32", "expected dtype=torch.float64", "Convert")),
    "dtype of wrong type": Mistake(_wrap(dtype="float32"), "TypeError", ("dtype must be a torch.dtype", "found 'float32'")),
    "device that is not here": Mistake(_wrap(device="cuda:99"), "ValueError", ("device='cuda:99'",)),
    "device that does not exist": Mistake(_wrap(device="abacus"), "ValueError", ("device='abacus'",)),
    "device of wrong type": Mistake(_wrap(device=1.5), "TypeError", ("device", "1.5|float")),
    "policy of wrong type": Mistake(_wrap(policy={"prefetch_depth": 2}), "TypeError", ("ShardingPolicy", "found dict")),
    "group of wrong type": Mistake(_wrap(process_group="world"), "TypeError", ("ProcessGroup", "found str")),
    "no module": Mistake(lambda wrong, rank, m: Zero3Layer([m] if wrong else m), "TypeError", ("torch.nn.Module", "found list")),
    "module wrapped before": Mistake(_wrap_again, "ValueError", ("'weight'", "already sharded", "Wrap a module once")),
    "layer in a layer": Mistake(_wrap_twice, "ValueError", ("Zero3Layer", "already", "once")),
    "expanded parameter": Mistake(_wrap_changed(_overlap), "ValueError", ("'extra'", "overlaps itself", "clone")),
    "parameter of a subclass": Mistake(
        _wrap_changed(_subclassed), "ValueError", ("'bias'", "Subclass", "Build the model of plain parameters")
    ),
    "lazy parameter": Mistake(
        lambda wrong, rank, m: Zero3Layer(nn.LazyLinear(5) if wrong else m), "ValueError", ("'weight' of LazyLinear", "run a forward first")
    ),
    "scripted module": Mistake(_jit(torch.jit.script, Zero3Layer), "ValueError", ("module '0' is a RecursiveScriptModule", *_INSTEAD)),
    "scripted block": Mistake(
        _jit(torch.jit.script, lambda model: zero3.shard(model, nn.Module)), "ValueError", ("module '0' is a Recursive", *_INSTEAD)
    ),
    "traced block": Mistake(
        _jit(lambda module: torch.jit.trace(module, torch.ones(2, 3)), lambda model: zero3.shard(model, nn.Module)),
        "ValueError",
        ("module '0' is a TopLevelTracedModule", *_INSTEAD),
    ),
    "no layers": Mistake(lambda wrong, rank, m: Zero3Sequential([] if wrong else [_layer()]), "ValueError", ("empty", "at least one")),
    "a bare module among layers": Mistake(
        lambda wrong, rank, m: Zero3Sequential([_layer(), m if wrong else _layer()]),
        "TypeError",
        ("item 1", "Linear", "expected a Zero3Layer", "Zero3Layer\\(module\\)"),
    ),
    "no module among layers": Mistake(
        lambda wrong, rank, m: Zero3Sequential([_layer(), 5 if wrong else _layer()]),
        "TypeError",
        ("item 1 is a int", "expected a Zero3Layer"),
    ),
    "bare modules only": Mistake(lambda wrong, rank, m: Zero3Sequential([m if wrong else _layer()]), "TypeError", ("item 0", "Linear")),
    "no iterable": Mistake(lambda wrong, rank, m: Zero3Sequential(m if wrong else [_layer()]), "TypeError", ("modules", "Linear")),
}


class Refused(NamedTuple):
    kind: str
    text: str
    seconds: float


def refused(rank: Rank, mistake: Callable[[bool, Rank, nn.Module], object], is_wrong: bool) -> Refused | None:
    """How a mistake was refused; checks that the module, the process group and the rank are as good as before."""
    torch.manual_seed(5)
    module, x = nn.Linear(3, 5), torch.ones(2, 3)
    expected, began = module(x), time.monotonic()
    try:
        mistake(is_wrong, rank, module)
    except Exception as error:
        found = Refused(type(error).__name__, str(error), time.monotonic() - began)
    else:
        return None
    module.bias = nn.Parameter(module.bias.detach().as_subclass(Tensor))
    assert torch.equal(module(x), expected), "the module is no longer what it was"
    assert type(module.weight) is nn.Parameter and module.weight.requires_grad in (True, False)
    layer = Zero3Layer(nn.Linear(3, 5))
    layer(x).sum().backward()
    assert torch.equal(layer.get_trainable_chunk()[0].grad.as_subclass(Tensor).abs().max(), torch.tensor(2.0)), "ranks can't train any more"
    return found


def refuse(rank: Rank, name: str, alone: bool) -> Refused | None:
    return refused(rank, MISTAKES[name].make, rank.number == 1 or not alone)


@pytest.mark.parametrize("alone", [False, True], ids=["on all ranks", "on one rank"])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_the_same_error_on_every_rank(name: str, alone: bool) -> None:
    first, second = on_ranks(2, refuse, name, alone)
    assert first is not None, "nothing was refused"
    assert second is not None
    assert (first.kind, first.text) == (second.kind, second.text)
    assert first.kind == MISTAKES[name].kind
    for pattern in (*MISTAKES[name].says, "rank 1" if alone else "rank 0"):
        assert re.search(pattern, first.text), first.text
    assert max(first.seconds, second.seconds) < PROMPT


@pytest.mark.slow
@pytest.mark.parametrize("name", ["world_size", "dtype", "module wrapped before", "no layers"])
def test_the_same_without_torchs_debug_mode_and_on_three_ranks(name: str) -> None:
    errors = on_ranks(3, refuse, name, True, debug="OFF")
    assert len({(error.kind, error.text) for error in errors}) == 1
    assert errors[0].text.startswith("rank 1: ")


def without_asserts() -> None:
    """Run by `python -O`: prints every mistake that passes there."""
    for found in on_ranks(2, refuse_all):
        for case, kind in found.items():
            if kind != MISTAKES[case[0]].kind:
                print(case, kind)


def refuse_all(rank: Rank) -> dict[tuple[str, bool], str]:
    if __debug__:
        raise RuntimeError("this is not python -O")
    cases = [(name, alone) for name in MISTAKES for alone in (False, True)]
    return {case: getattr(refuse(rank, *case), "kind", "nothing was refused") for case in cases}


@pytest.mark.slow
def test_mistakes_are_refused_where_asserts_are_taken_out() -> None:
    script = "from tests.core.test_disagreement import without_asserts; without_asserts()"
    done = subprocess.run([sys.executable, "-O", "-c", script], capture_output=True, text=True, timeout=280, check=True)
    assert done.stdout == ""


# -- a launcher without a process group


def alone_under_a_launcher(rank: Rank) -> str:
    os.environ["WORLD_SIZE"] = "2"
    try:
        with pytest.raises(RuntimeError) as caught:
            Zero3Layer(nn.Linear(2, 2))
        return str(caught.value)
    finally:
        del os.environ["WORLD_SIZE"]


def test_a_launcher_without_a_process_group_is_an_error() -> None:
    for text in on_ranks(2, alone_under_a_launcher, process_group=False):
        assert "WORLD_SIZE=2" in text
        assert "init_process_group" in text


def group_of_another_device(rank: Rank) -> str:
    dist.init_process_group("cuda:gloo", init_method=f"file://{rank.scratch / 'r'}", rank=rank.number, world_size=rank.world_size)
    with pytest.raises(ValueError, match="device=") as caught:
        Zero3Layer(nn.Linear(2, 2))
    return str(caught.value)


def test_a_group_that_does_not_serve_the_layers_device_is_an_error() -> None:
    for text in on_ranks(2, group_of_another_device, process_group=False):
        assert "the layer is on cpu" in text
        assert "only tensors on cuda" in text


def a_group_without_this_rank(rank: Rank) -> str:
    group = dist.new_group([0])
    if rank.number == 0:
        Zero3Layer(nn.Linear(2, 2), process_group=group)
        return ""
    with pytest.raises(ValueError, match="not a member") as caught:
        Zero3Layer(nn.Linear(2, 2), process_group=group)
    return str(caught.value)


def test_a_rank_outside_of_a_group_is_told_so_and_the_group_is_not_disturbed() -> None:
    assert "not a member" in on_ranks(2, a_group_without_this_rank)[1]


def test_layers_of_two_groups_are_no_sequential_model() -> None:
    def body(group: ThreadCommunicator) -> None:
        other = ThreadCommunicator(others, group.rank)
        layers = [Zero3Layer(nn.Linear(2, 2), process_group=each) for each in (group, other)]
        with pytest.raises(ValueError, match="item 1 has another process group than item 0"):
            Zero3Sequential(layers)

    others = World(2)
    run_ranks(2, body)
