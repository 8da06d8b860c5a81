"""Which parameters a policy quantises, and which it leaves alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..core.sites import ParameterSites
from ..modules import named
from ..policy import ShardingPolicy, chosen, info_of
from ..quantized.formats import Format

__all__: list[str] = []


def without_ignored(
    parameters: Sequence[ParameterSites], policy: ShardingPolicy, prefix: str = ""
) -> list[ParameterSites]:
    """The parameters that are sharded. `prefix`: what stands before their names in the model.

    Raises:
        ValueError, TypeError: `ignored` has raised, or returned something else than True or False.
    """
    return [sites for sites in parameters if not _is_ignored(sites, policy, prefix + sites.name)]


def _is_ignored(sites: ParameterSites, policy: ShardingPolicy, name: str) -> bool:
    if policy.ignored is None:
        return False
    return chosen("ignored", policy.ignored, name, info_of(name, sites.parameter))


def formats_of(
    parameters: Sequence[ParameterSites], policy: ShardingPolicy, prefix: str, model: nn.Module
) -> dict[str, Format]:
    """The formats of those parameters that are quantised, by name.

    Args:
        parameters: The parameters of one layer.
        policy: The layer's policy.
        prefix: What stands before their names in the model.
        model: The model that they belong to, which knows its output embeddings.

    Raises:
        ValueError, TypeError: The format's `select` has raised, or returned something else than
            True or False, or selected a parameter that trains or has no floating values.
    """
    if policy.quantize is None:
        return {}
    kind, heads = policy.quantize, _heads(model)
    found = {}
    for sites in parameters:
        name, parameter = prefix + sites.name, sites.parameter
        if kind.select is None:
            wanted = (
                not parameter.requires_grad
                and parameter.is_floating_point()
                and id(parameter) not in heads
                and _is_weight(sites)
            )
        else:
            wanted = chosen("quantize.select", kind.select, name, info_of(name, parameter))
        if wanted and (parameter.requires_grad or not parameter.is_floating_point()):
            what = "trains" if parameter.requires_grad else f"is {parameter.dtype}"
            raise ValueError(
                f"quantize.select of the policy selects parameter {name!r}, which {what}: only "
                "frozen floating parameters are quantised"
            )
        if wanted:
            found[sites.name] = kind
    return found


def nothing_selected(
    what: str, policy: ShardingPolicy, parameters: Iterable[ParameterSites]
) -> ValueError:
    """The error of a policy that quantises nothing."""
    trained = [sites.name for sites in parameters if sites.parameter.requires_grad]
    why = (
        f"{named(trained)} train; freeze what is to be quantised before wrapping"
        if trained
        else "see select= of the format"
    )
    return ValueError(
        f"quantize={policy.quantize} selects no parameter of {what}: {why}, or leave quantize out"
    )


def _is_weight(sites: ParameterSites) -> bool:
    """Whether it is the weight of a linear layer, or the weights of experts in one parameter."""
    shape = tuple(sites.parameter.shape)
    return all(_is_product(module, attribute, shape) for module, attribute in sites.places)


def _is_product(module: nn.Module, attribute: str, shape: tuple[int, ...]) -> bool:
    if isinstance(module, nn.Linear):  # torch's attention reads its output layer's weight itself
        return attribute == "weight" and not isinstance(module, NonDynamicallyQuantizableLinear)
    # Not convolutions, positions that are learned, or maps in groups: only experts say how many
    # they are.
    return (
        len(shape) == 3
        and type(count := getattr(module, "num_experts", None)) is int
        and shape[0] == count
    )


def _heads(model: nn.Module) -> set[int]:
    """The ids of the parameters of output embeddings."""
    found: set[int] = set()
    for module in model.modules():
        if callable(getattr(type(module), "get_output_embeddings", None)):
            try:
                head = module.get_output_embeddings()  # type: ignore[operator]
            except (NotImplementedError, AttributeError):  # models without embeddings answer so
                continue
            found |= (
                {id(parameter) for parameter in head.parameters()}
                if isinstance(head, nn.Module)
                else set()
            )
    return found
