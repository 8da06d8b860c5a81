"""torch's and transformers' own modules inside layers, each with its own way of handling parameters and buffers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import zero3
from tests.support.processes import Rank, on_ranks
from zero3 import Zero3Layer

BATCH, STEPS = 6, 4


class Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x, x)


class First(nn.Module):
    """Only the first of what a module returns."""

    def __init__(self, inner: nn.Module, repeat: int = 1) -> None:
        super().__init__()
        self.inner, self.repeat = inner, repeat

    def forward(self, x: Tensor) -> Any:
        return self.inner(*[x] * self.repeat)[0]


def rows(*shape: int) -> Callable[[int], Tensor]:
    return lambda step: torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def words(step: int) -> Tensor:
    return torch.randint(0, 11, (BATCH, 3), generator=torch.Generator().manual_seed(step))


class Case(NamedTuple):
    build: Callable[[], nn.Module]
    data: Callable[[int], Tensor]
    same_data: bool = False  # on all ranks: for modules that look at more than one sample at a time
    inside: tuple[str, ...] = ()  # submodules that become layers of their own, lists one by one; the rest is one around them


def _old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still in many models
        return nn.utils.weight_norm(nn.Conv1d(3, 5, 2))


def _batch_norm() -> nn.Module:
    norm = nn.BatchNorm1d(5)
    norm.running_mean.normal_()  # rank 0's count, so every rank begins with its own
    norm.num_batches_tracked.random_(1, 100)
    return nn.Sequential(nn.Conv1d(3, 5, 2), norm, nn.ReLU())


def _pruned() -> nn.Module:
    module = nn.Linear(5, 7)
    prune.l1_unstructured(module, "weight", amount=0.4)
    return module


class Logits(nn.Module):
    """A causal language model of transformers, from words to logits."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        sizes = {"vocab_size": 11, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 13}
        config = getattr(transformers, f"{kind}Config")(**sizes, max_position_embeddings=16, **options)
        self.model = getattr(transformers, f"{kind}ForCausalLM")(config)

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False).logits


CASES = {
    "LSTM, with its flattened weights": Case(lambda: First(nn.LSTM(5, 7, num_layers=2, bidirectional=True, batch_first=True)), rows(4, 5)),
    "LSTM with a projection": Case(lambda: First(nn.LSTM(5, 7, proj_size=3, batch_first=True)), rows(4, 5)),
    "GRU": Case(lambda: First(nn.GRU(5, 7, batch_first=True)), rows(4, 5)),
    "RNN cell": Case(lambda: nn.RNNCell(5, 7), rows(5)),
    "MultiheadAttention": Case(lambda: First(nn.MultiheadAttention(6, 2, batch_first=True), repeat=3), rows(4, 6)),
    "MultiheadAttention with biases and other sizes": Case(
        lambda: First(nn.MultiheadAttention(6, 2, kdim=6, vdim=6, add_bias_kv=True, batch_first=True), repeat=3), rows(4, 6)
    ),
    "TransformerEncoderLayer": Case(lambda: nn.TransformerEncoderLayer(6, 2, 9, dropout=0.0, batch_first=True), rows(4, 6)),
    "TransformerEncoder, a deep copy inside": Case(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 9, 0.0, batch_first=True), 2), rows(4, 6)
    ),
    "weight_norm": Case(lambda: parametrizations.weight_norm(nn.Linear(5, 7)), rows(5)),
    "weight_norm as it was": Case(_old_weight_norm, rows(3, 6)),
    "orthogonal": Case(lambda: parametrizations.orthogonal(nn.Linear(5, 5)), rows(5)),
    "spectral_norm": Case(lambda: parametrizations.spectral_norm(nn.Linear(5, 7)), rows(5)),
    "pruned": Case(_pruned, rows(5)),
    "BatchNorm": Case(_batch_norm, rows(3, 6), same_data=True),
    "GroupNorm and convolutions": Case(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 2, bias=False), nn.GroupNorm(2, 4), nn.ConvTranspose2d(4, 2, 2)), rows(3, 4, 4)
    ),
    "Embedding with a padding index": Case(lambda: nn.Embedding(11, 5, padding_idx=0), words),
    "EmbeddingBag": Case(lambda: nn.EmbeddingBag(11, 5, mode="mean"), words),
    "Bilinear": Case(lambda: Twice(nn.Bilinear(5, 5, 3)), rows(5)),
    "PReLU": Case(lambda: nn.Sequential(nn.Linear(5, 7), nn.PReLU(7)), rows(5)),
    "GPTNeoX": Case(
        lambda: Logits("GPTNeoX", hidden_dropout=0.0, attention_dropout=0.0),
        words,
        inside=("model.gpt_neox.embed_in", "model.gpt_neox.layers", "model.gpt_neox.final_layer_norm", "model.lm_head"),
    ),
    "Llama": Case(lambda: Logits("Llama", num_key_value_heads=1), words, inside=("model.model.layers",)),
}


def wrap_inside(model: nn.Module, names: tuple[str, ...]) -> None:
    for name in names:
        parent, _, attribute = name.rpartition(".")
        found = model.get_submodule(name)
        layers = nn.ModuleList(map(Zero3Layer, found)) if isinstance(found, nn.ModuleList) else Zero3Layer(found)
        setattr(model.get_submodule(parent), attribute, layers)


def train(model: nn.Module, parameters: list[nn.Parameter], batches: list[Tensor]) -> list[Tensor]:
    """The outputs of every step, in training; and of evaluation, at last."""
    optimizer, outputs = torch.optim.SGD(parameters, lr=0.2, momentum=0.9), []
    for x in batches:
        output = model(x)
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(output.detach())
    model.eval()
    with torch.no_grad():
        outputs.append(model(batches[0]))
    return outputs


def worst_difference(rank: Rank, name: str) -> float:
    case = CASES[name]
    part = slice(None) if case.same_data else slice(rank.number, None, rank.world_size)
    batches = [case.data(step) for step in range(STEPS)]
    torch.manual_seed(1)
    plain = case.build().double()
    torch.manual_seed(1 + rank.number)  # rank 0's values and buffers win
    module = case.build().double()
    wrap_inside(module, case.inside)
    model = Zero3Layer(module)
    expected = train(plain, list(plain.parameters()), batches)
    found = train(model, model.get_trainable_chunk(), [x[part] for x in batches])
    state, plain_state = zero3.full_state_dict(model, rank0_only=False), plain.state_dict()
    assert state.keys() == plain_state.keys()
    differences = [(a - b[part]).abs().max() for a, b in zip(found, expected, strict=True)]
    differences += [(state[key] - value).abs().max() for key, value in plain_state.items()]
    return max(d.item() for d in differences)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_module_trains_and_evaluates_as_it_does_unsharded(name: str) -> None:
    assert max(on_ranks(2, worst_difference, name)) < 1e-12
