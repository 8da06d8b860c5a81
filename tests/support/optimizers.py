"""Every optimizer of torch.optim, sharded and not: the table of docs/optimizers.md.

python -m tests.support.optimizers        # prints the table
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import zero3
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.training import loss_of, odd_model, sentences

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


def row(entry: Entry) -> str:
    cells = []
    for whole in (False, True):
        found = [verdict(entry, world_size, whole=whole) for world_size in WORLD_SIZES]
        cells.append(found[0] if len(set(found)) == 1 else " / ".join(found))
    return f"| {entry.name} | {cells[0]} | {cells[1]} |"


def table() -> str:
    return "\n".join(["| optimizer | on chunks | on whole parameters |", "|---|---|---|", *map(row, [*of_torch(), *of_others()])])


if __name__ == "__main__":
    print(table())
