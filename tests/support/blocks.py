"""An optimizer that keeps its state in eight bits, as bitsandbytes and torchao do, for models as small as tests have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 2
SHORTEST = 16 * BLOCK  # elements of a parameter from which on its state is quantised


class InBlocks(torch.optim.Optimizer):
    """SGD with momentum. A long parameter's momentum is codes in the parameter's shape, a scale for each block of two elements, and a
    table that all share. A short one's is as plain SGD has it.
    """

    def __init__(self, params: Any, lr: float = 0.05, momentum: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.one(p, p.grad, self.state[p], group["lr"], group["momentum"])
        return loss

    def one(self, p: Tensor, gradient: Tensor, state: dict[str, Any], lr: float, momentum: float) -> None:
        quantised = p.numel() >= SHORTEST and p.numel() % BLOCK == 0
        if not state:
            state["step"] = 0
            if quantised:
                state["codes"] = torch.zeros_like(p, dtype=torch.int8)
                state["scales"] = torch.zeros(p.numel() // BLOCK, dtype=p.dtype, device=p.device)
                state["levels"] = torch.arange(-127, 128, dtype=p.dtype, device=p.device) / 127
            else:
                state["momentum"] = torch.zeros_like(p)
        state["step"] += 1
        if quantised:
            levels, scales = state["levels"], state["scales"]
            old = (levels[state["codes"].reshape(-1).long() + 127].view(-1, BLOCK) * scales[:, None]).view_as(p)
        else:
            old = state["momentum"]
        new = momentum * old + gradient
        if quantised:
            rows = new.reshape(-1, BLOCK)
            scales.copy_(rows.abs().amax(1))
            state["codes"].copy_((rows / scales.clamp(min=1e-30)[:, None] * 127).round().view_as(p))
        else:
            old.copy_(new)
        p.sub_(new, alpha=lr)
