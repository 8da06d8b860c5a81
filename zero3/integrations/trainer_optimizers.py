"""The optimizer that a Trainer makes of a class that it names, over a sharded model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..access import states_of
from ..modules import named
from ..optim.param_groups import named_parameters, param_groups
from ..optim.probe import fitting
from ..optim.several import OptimizerList
from ..policy import ParamInfo
from .handover import tell_parts

__all__: list[str] = []

# parts of the names of optimizers that take a model apart themselves, by its own parameters
_DIVIDING = ("galore", "apollo", "lomo", "layerwise")


def refuse_dividing(name: str) -> None:
    """Raises ValueError if the optimizer of this name needs the unsharded model."""
    if any(part in name for part in _DIVIDING):
        raise ValueError(
            "this optimizer divides the model's own parameters, and a sharded model has chunks "
            "instead. Give it whole parameters: "
            'zero3.param_groups(model, lambda name, info: {"whole": True})'
        )


def make_optimizer(
    kind: Any,
    options: Mapping[str, Any],
    models: Sequence[nn.Module],
    weight_decay: float,
    decays: Collection[str],
    device: torch.device,
) -> torch.optim.Optimizer:
    """Makes an optimizer over the first of `models`, whose others are divided as it is.

    Its groups are flat chunks, aligned parts or whole parameters: the first on which it is exact.

    Args:
        kind: A class, or what transformers calls a factory: `kind()(model, **options)` returns one
            optimizer or several.
        options: The class's own.
        models: Sharded.
        weight_decay: Of the parameters whose names are in `decays`.
        decays: As above.
        device: Where it is tried.

    Raises:
        ValueError: It does not take all parameters.
    """
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        if len(models) > 1:
            raise ValueError(
                "sync_ref_model mixes the parameters of two models pair by pair, and a factory "
                "divides one: name a class of optimizers, or leave out sync_ref_model"
            )
        made = kind()(models[0], **options)
        return OptimizerList(*made) if isinstance(made, list | tuple) else made
    sample = _tried(kind, options, models[0])
    cut = {} if sample is None else fitting(sample, sample.param_groups[0], device) or {}

    def choose(name: str, info: ParamInfo) -> dict[str, Any]:
        return {"weight_decay": float(name in decays), **cut}

    groups, *_ = [param_groups(model, choose) for model in models]
    for group in groups:  # two of them whatever the decay is, so that a checkpoint fits
        group["weight_decay"] *= weight_decay
    optimizer = kind(groups, **options)
    if kind.__module__.startswith("bitsandbytes") and options.get("optim_bits") == 8:
        # as the Trainer does
        embeddings = [m for m in models[0].modules() if isinstance(m, nn.Embedding)]
        tell_parts(optimizer, models[0], {id(m.weight): {"optim_bits": 32} for m in embeddings})
    return optimizer


def _tried(
    kind: type[torch.optim.Optimizer], options: Mapping[str, Any], model: nn.Module
) -> torch.optim.Optimizer | None:
    """Returns an optimizer of this class over a small parameter, or None if it takes none."""
    made: dict[int, torch.optim.Optimizer] = {}
    trained = [
        (name, sharded.sites.parameter.ndim)
        for name, _, sharded in named_parameters(model, states_of(model))
        if sharded.chunk.trains
    ]
    for ndim in sorted({ndim for _, ndim in trained}):
        try:
            made[ndim] = kind([nn.Parameter(torch.ones((2,) * ndim))], **options)
        except Exception:  # of any kind, since the optimizer may be of any library
            continue
    refused = [name for name, ndim in trained if ndim not in made]
    if made and refused:
        raise ValueError(
            f"{kind.__name__} does not take {len(refused)} of the model's parameters: "
            f"{named(refused, 4)}. Give them to another "
            "one: zero3.OptimizerList(muon, adamw), each over its groups of zero3.param_groups"
        )
    return next(iter(made.values()), None)
