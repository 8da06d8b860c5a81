"""Every optimizer of torch.optim, and those of bitsandbytes and torchao, sharded and not: the table of docs/optimizers.md.

python -m tests.support.optimizers        prints the table; `make optimizers` with these libraries installed
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import zero3
from tests.support.blocks import Block, Parts, go, own, together
from tests.support.processes import Rank, on_ranks
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.training import loss_of, odd_model, sentences
from zero3.optim.low_bit import tensors_of

STEPS = 10
TOLERANCE = 1e-9  # of the largest change that training makes, of any loss and any element
WORLD_SIZES = (2, 3)
Make = Callable[[Any], torch.optim.Optimizer]


class Entry(NamedTuple):
    name: str
    make: Make  # of parameters or groups
    takes: Callable[[str, int], bool] = lambda name, ndim: True  # by name and number of dimensions; AdamW trains the rest


def of_torch() -> list[Entry]:
    """All that torch.optim has, but for SparseAdam, which takes sparse gradients only: a reduced gradient is dense."""
    kinds = [v for v in vars(torch.optim).values() if inspect.isclass(v) and issubclass(v, torch.optim.Optimizer)]
    chosen = [kind for kind in kinds if kind not in (torch.optim.Optimizer, torch.optim.SparseAdam)]
    matrices: dict[str, Any] = {"Muon": {"takes": lambda name, ndim: ndim == 2}}
    return [Entry(kind.__name__, kind, **matrices.get(kind.__name__, {})) for kind in sorted(chosen, key=lambda kind: kind.__name__)]


class Written(torch.optim.Optimizer):
    """What others write: a step for one parameter and its state."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(self.update(parameter, parameter.grad, self.state[parameter]), alpha=group["lr"])

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
        raise NotImplementedError


class Lion(Written):
    """The sign of a momentum: each element by itself."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
        momentum = state.setdefault("momentum", torch.zeros_like(parameter))
        sign = momentum.lerp(gradient, 0.1).sign()
        momentum.lerp_(gradient, 0.01)
        return sign


class Lamb(Written):
    """Adam's step, as long as the parameter: a norm of each."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
        mean = state.setdefault("mean", torch.zeros_like(parameter)).lerp_(gradient, 0.1)
        square = state.setdefault("square", torch.zeros_like(parameter)).lerp_(gradient * gradient, 0.01)
        step = mean / (square.sqrt() + 1e-6)
        return step * (parameter.norm() / step.norm() if parameter.any() and step.any() else 1.0)


class Lars(Written):
    """The gradient, as long as the parameter: it asks for the gradient's norm."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
        return gradient * (parameter.norm() / (gradient.norm() + 1e-3))


class Shampoo(Written):
    """A root of the second moments of rows and of columns: the whole matrix at once."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
        flat = gradient.reshape(gradient.shape[0] if gradient.ndim else 1, -1).double()
        sides = [flat @ flat.T, flat.T @ flat]
        roots = []
        for name, side in zip(("rows", "columns"), sides, strict=True):
            values, vectors = torch.linalg.eigh(state.setdefault(name, 1e-3 * torch.eye(len(side), dtype=side.dtype)).add_(side))
            roots.append(vectors @ torch.diag(values.clamp(min=1e-6) ** -0.25) @ vectors.T)
        return (roots[0] @ flat @ roots[1]).view(parameter.shape).to(parameter.dtype)


def of_others() -> list[Entry]:
    return [Entry(f"a {kind.__name__} of {len(inspect.getsource(kind).splitlines())} lines", kind) for kind in (Lamb, Lars, Lion, Shampoo)]


class MuonAndAdamW:
    """transformers calls it a factory: it makes one, and calls it with the model."""

    def __call__(self, model: Any, **options: Any) -> Any:
        if zero3.is_sharded(model):
            groups = zero3.param_groups(model, lambda name, info: {"whole": is_matrix(name, info)})
            matrices, others = ([group for group in groups if group["whole"] == whole] for whole in (True, False))
        else:
            named = list(model.named_parameters())
            matrices, others = ([p for name, p in named if is_matrix(name, p) == whole] for whole in (True, False))
        made = torch.optim.Muon(matrices, **options), torch.optim.AdamW(others, **options)
        return made if zero3.is_sharded(model) else Both(*made)


def is_matrix(name: str, info: Any) -> bool:
    return info.ndim == 2 and "embed" not in name


class Both(torch.optim.Optimizer):
    """Stock trainers take one optimizer."""

    def __init__(self, *members: torch.optim.Optimizer) -> None:
        self.members = members
        self.__setstate__({"defaults": {}, "state": {}, "param_groups": [group for member in members for group in member.param_groups]})

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for member in self.members:
            member.step()
        return loss


def optimizers_of(entry: Entry, groups: list[dict[str, Any]]) -> list[torch.optim.Optimizer]:
    """One of the entry's kind, and an AdamW for what that does not take."""
    kinds = [entry.make([g for g in groups if g["taken"]])] if any(g["taken"] for g in groups) else []
    return kinds + ([torch.optim.AdamW([g for g in groups if not g["taken"]])] if not all(g["taken"] for g in groups) else [])


def plain_groups(entry: Entry, model: nn.Module) -> list[dict[str, Any]]:
    taken: dict[bool, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        taken.setdefault(entry.takes(name, parameter.ndim), []).append(parameter)
    return [{"params": parameters, "taken": key} for key, parameters in taken.items()]


def train(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], rank: int, world_size: int) -> list[float]:
    losses = []
    for step in range(STEPS):
        first: list[float] = []

        def closure(step: int = step, first: list[float] = first) -> Tensor:
            model.zero_grad()
            loss = loss_of(model, sentences(step)[rank::world_size])
            loss.backward()
            first.append(loss.item())
            return loss

        for number, optimizer in enumerate(optimizers):
            closure() if not number else None
            optimizer.step(closure) if type(optimizer).__name__ == "LBFGS" else optimizer.step()
        losses.append(first[0])
    return losses


def modules() -> list[nn.Module]:
    return odd_model(torch.float64)


def verdict(entry: Entry, world_size: int, *, whole: bool) -> str:
    """`equal`, `refused` (by `check_optimizer`, or by the optimizer itself), or by how much it differs."""
    made = [modules() for _ in range(world_size)]
    expected = nn.Sequential(*modules())

    def options(name: str, info: zero3.ParamInfo) -> dict[str, Any]:
        taken = entry.takes(name, info.ndim)
        return {"taken": taken, "whole": True} if whole and taken else {"taken": taken}

    def body(group: ThreadCommunicator) -> tuple[list[float], dict[str, Tensor]] | None:
        model = zero3.Zero3Sequential([zero3.Zero3Layer(module, process_group=group) for module in made[group.rank]])
        groups = zero3.param_groups(model, options) if whole or len(set(takes)) > 1 else [{"params": model.parameters(), "taken": True}]
        try:
            optimizers = optimizers_of(entry, groups)
            zero3.check_optimizer(model, *optimizers)
        except ValueError:
            return None
        return train(model, optimizers, group.rank, group.world_size), zero3.full_state_dict(model, rank0_only=False)

    takes = [entry.takes(name, parameter.ndim) for name, parameter in expected.named_parameters()]
    found = [run for run in run_ranks(world_size, body) if run is not None]
    if not found:
        return "refused"
    assert len(found) == world_size
    losses = train(expected, optimizers_of(entry, plain_groups(entry, expected)), 0, 1)
    ours = [sum(run[0][step] for run in found) / world_size for step in range(STEPS)]
    off = [largest(ours, losses) / largest(losses[:1] * STEPS, losses)]
    before = nn.Sequential(*modules()).state_dict()
    changed = max(largest(before[name], value) for name, value in expected.state_dict().items())
    off += [largest(state[name], value) / changed for _, state in found for name, value in expected.state_dict().items()]
    return "equal" if max(off) <= TOLERANCE else f"differs by {max(off):.0e} of what training changed"


def largest(a: Any, b: Any) -> float:
    return (torch.as_tensor(a) - torch.as_tensor(b)).abs().max().item()


FLAT, WHOLE, ALIGNED = "`get_trainable_chunk(model)`", '`{"whole": True}`', '`{"align": 256}`'


def row(entry: Entry) -> str:
    """What it is to be given: chunks if it is right on them, and else whole parameters."""
    for what, whole in ((FLAT, False), (WHOLE, True)):
        found = [verdict(entry, world_size, whole=whole) for world_size in WORLD_SIZES]
        told = found[0] if len(set(found)) == 1 else " / ".join(found)
        if told != "refused":
            return f"| {entry.name} | {what} | {told} | {state_bytes(entry.make)} |"
    return f"| {entry.name} | nothing | refused | |"


def state_bytes(make: Make) -> str:
    """Of its state for each element of a matrix in fp32."""
    parameter = nn.Parameter(torch.ones(256, 256))
    parameter.grad = torch.ones_like(parameter)
    optimizer = make([parameter])
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    tensors = [each for each in tensors_of(optimizer.state[parameter], (256, 256)).values() if isinstance(each, Tensor) and each.dim()]
    return f"{sum(each.nbytes for each in tensors) / parameter.numel():.2f}"


def low_bit() -> dict[str, Make]:
    """Those that keep their state in blocks, of libraries that `make low-bit` installs."""
    names = {
        "bitsandbytes": ("bitsandbytes.optim", ("AdamW8bit", "Adam8bit", "Lion8bit", "AdEMAMix8bit")),
        "torchao": ("torchao.optim", ("AdamW8bit", "AdamW4bit", "AdamWFp8")),
    }
    return {
        f"{library} {name}": getattr(importlib.import_module(module), name) for library, (module, kinds) in names.items() for name in kinds
    }


def same_bits(rank: Rank) -> dict[str, bool]:
    """Whether two steps of each give the bits of one process."""
    shapes, found = [(160, 128), (101, 96), (50,)], {}
    torch.compiler.set_stance("force_eager")  # torchao compiles its step, for half a minute
    for name, make in low_bit().items():
        model = zero3.shard(Parts(shapes), layers=Block, policy=zero3.ShardingPolicy(gradient_reduction="sum"))
        plain = Parts(shapes)
        go(model, make(zero3.param_groups(model, lambda name, info: {"align": 256})), range(2), own(rank.number, rank.world_size))
        go(plain, make(plain.parameters()), range(2), together)
        state = zero3.full_state_dict(model, rank0_only=False)
        found[name] = all(torch.equal(state[key], value.detach()) for key, value in plain.named_parameters())
    return found


def low_bit_rows() -> list[str]:
    found = on_ranks(2, same_bits)
    told = {name: "equal, to the bit" if all(each[name] for each in found) else "differs" for name in found[0]}
    return [f"| {name} | {ALIGNED} | {told[name]} | {state_bytes(make)} |" for name, make in low_bit().items()]


def table() -> str:
    rows = list(map(row, [*of_torch(), *of_others()]))
    try:
        rows += low_bit_rows()
    except ModuleNotFoundError as error:
        rows.append(f"({error.name} is not installed: make optimizers)")
    return "\n".join(["| optimizer | what to give it | result | bytes of state a parameter |", "|---|---|---|---|", *rows])


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(table())
