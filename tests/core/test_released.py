"""A released parameter: metadata answers, values are refused with a name and a remedy, whoever asks and however."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import get_testing_overrides

from zero3.core.autograd import tensors_in
from zero3.core.parameters import ParameterSites
from zero3.core.released import ReleasedParameter, refuse_values


@pytest.fixture
def released() -> nn.Parameter:
    """As a layer leaves one: its values are gone, what it shows is one NaN stretched to its shape."""
    module = nn.Linear(4, 3, bias=False, dtype=torch.bfloat16)
    sites = ParameterSites("weight", module.weight, [(module, "weight")])
    sites.hide(torch.full((), float("nan"), dtype=torch.bfloat16).expand(3, 4))
    module.weight.zero3_name = "'weight' of layer '0' (Linear)"  # type: ignore[attr-defined]
    return module.weight


def test_metadata_answers(released: nn.Parameter) -> None:
    assert released.shape == (3, 4) and released.size() == (3, 4) and released.size(0) == 3
    assert released.dtype == torch.bfloat16 and released.device.type == "cpu" and released.layout == torch.strided
    assert released.numel() == torch.numel(released) == 12 and len(released) == 3
    assert released.dim() == released.ndim == 2 and released.element_size() == released.itemsize == 2 and released.nbytes == 24
    assert released.requires_grad is True
    assert released.is_floating_point() and torch.is_floating_point(released) and not released.is_complex()
    assert not released.is_cuda and not released.is_meta and not released.is_sparse
    assert torch.is_tensor(released) and isinstance(released, nn.Parameter)


def test_it_is_itself_in_dicts_and_lists(released: nn.Parameter) -> None:
    assert {released: 1}[released] == 1
    assert released in [released] and id(released) in {id(p) for p in [released]}


@pytest.mark.parametrize("show", [repr, str, lambda p: f"{p}", lambda p: f"{[p]}", lambda p: f"{p!r:>5}"])
def test_it_can_be_printed(released: nn.Parameter, show: Callable[[Any], str]) -> None:
    assert "Parameter(released, shape=(3, 4), dtype=torch.bfloat16, requires_grad=True)" in show(released)


VALUES: dict[str, Callable[[Any], object]] = {
    "add": lambda p: p + 1,
    "radd": lambda p: 1 + p,
    "sub with a tensor before it": lambda p: torch.ones(3, 4) - p,
    "matmul": lambda p: torch.ones(2, 3).bfloat16() @ p,
    "sum": lambda p: p.sum(),
    "torch.sum": torch.sum,
    "clone": lambda p: p.clone(),
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "set data": lambda p: setattr(p, "data", torch.ones(3, 4)),
    "grad": lambda p: p.grad,
    "view": lambda p: p.view(-1),
    "index": lambda p: p[0],
    "set index": lambda p: p.__setitem__(0, 1),
    "iterate": lambda p: list(p),
    "in place": lambda p: p.add_(1),
    "initialise": lambda p: nn.init.zeros_(p),
    "under no_grad": lambda p: torch.no_grad()(lambda: p.mul_(2))(),
    "item": lambda p: p[0, 0].item(),
    "bool": bool,
    "float": float,
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.numpy(),
    "contains": lambda p: 1.0 in p,
    "equal": lambda p: p == p,
    "torch.equal": lambda p: torch.equal(p, torch.ones(3, 4)),
    "to": lambda p: p.to(torch.float64),
    "double": lambda p: p.double(),
    "data_ptr": lambda p: p.data_ptr(),
    "cat, in a list": lambda p: torch.cat([torch.ones(3, 4), p]),
    "stack, in a tuple": lambda p: torch.stack((p, p)),
    "foreach": lambda p: torch._foreach_mul([p], 2.0),
    "as an out argument": lambda p: torch.add(torch.ones(3, 4), 1, out=p),
    "as a keyword": lambda p: nn.functional.linear(torch.ones(1, 4), weight=p),
    "linear": lambda p: nn.functional.linear(torch.ones(1, 4), p),
    "embedding": lambda p: nn.functional.embedding(torch.tensor([0]), p),
    "deepcopy": copy.deepcopy,
    "deepcopy in a dict": lambda p: copy.deepcopy({"weight": p}),
    "pickle": pickle.dumps,
    "torch.save": lambda p: torch.save({"weight": p}, io.BytesIO()),
    "share_memory_": lambda p: p.share_memory_(),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_are_refused(released: nn.Parameter, name: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        VALUES[name](released)
    said = str(caught.value)
    assert "'weight' of layer '0' (Linear) is released" in said
    assert "zero3.full_params(module)" in said and "get_trainable_chunk()" in said


@pytest.mark.parametrize(
    ("name", "operation"), [("sum", "sum"), ("data", "data"), ("set data", "data"), ("deepcopy", "deepcopy"), ("linear", "linear")]
)
def test_the_error_begins_with_what_was_done(released: nn.Parameter, name: str, operation: str) -> None:
    with pytest.raises(RuntimeError, match=rf"^{operation}: "):
        VALUES[name](released)


@pytest.mark.filterwarnings("ignore")
def test_no_function_of_torch_gets_at_the_values(released: nn.Parameter) -> None:
    """All of them, called with the released parameter in every place: an error, or an answer without a tensor but itself."""
    reached = 0
    for function, like in get_testing_overrides().items():
        positions = inspect.signature(like).parameters.values()
        arguments = [released for p in positions if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
        try:
            answer = function(*arguments)
        except Exception as error:
            reached += "is released" in str(error)
            continue
        assert not [tensor for tensor in tensors_in(answer) if tensor is not released], function
    assert reached > 500, "most functions take tensors first: they must have come to the guard"


def test_a_parameter_that_is_shown_again_is_ordinary(released: nn.Parameter) -> None:
    released.__class__ = nn.Parameter
    released.data = torch.full((3, 4), 2.0, dtype=torch.bfloat16)
    assert float(released.detach().sum()) == 24.0
    assert "released" not in repr(released)


def test_tensors_that_were_made_before_stay_ordinary() -> None:
    parameter = nn.Parameter(torch.ones(2))
    product = parameter * 3
    parameter.__class__ = ReleasedParameter
    assert type(product) is Tensor and product.tolist() == [3.0, 3.0]


def test_what_has_no_name_yet_is_told_of_all_the_same() -> None:
    with pytest.raises(RuntimeError, match=r"^add: a parameter is released, its values lie in chunks on all ranks. Read it inside"):
        refuse_values(None, "add")
