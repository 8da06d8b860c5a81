"""Memory that nobody has written: padding of chunks, and the zeros that stand for a parameter without a gradient."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.models import WORLDS
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn, check_parity, full_parameters, process_group


@pytest.fixture
def unwritten_memory_is_nan() -> Iterator[None]:
    """As torch does for whoever looks for uninitialised memory."""
    was, fills = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fills
    torch.use_deterministic_algorithms(was)


@pytest.mark.parametrize("world_size", [2, 3, 4, 6])
@pytest.mark.parametrize("on_meta", [True, False])
@pytest.mark.usefixtures("unwritten_memory_is_nan")
def test_padding_is_zero_from_the_beginning_wherever_a_layer_was_built(on_meta: bool, world_size: int) -> None:
    """Five elements on four ranks: the last one has two, and both are padding."""
    state = nn.Linear(4, 1).state_dict()

    def body(group: ThreadCommunicator) -> None:
        with torch.device("meta" if on_meta else "cpu"):
            module = nn.Linear(4, 1)
        layer = zero3.Zero3Layer(module, process_group=group, device="cpu")
        (chunk,) = layer.get_trainable_chunk()
        own = max(0, 5 - group.rank * chunk.numel())
        assert torch.equal(chunk.detach()[own:], torch.zeros(max(0, chunk.numel() - own))), f"rank {group.rank}: {chunk}"
        zero3.load_full_state_dict(layer, state if group.rank == 0 else None)
        assert not chunk.detach()[own:].any()
        for name, value in full_parameters(layer).items():
            assert torch.equal(value, state[name])

    run_ranks(world_size, body)


class PartlyUsed(nn.Module):
    """`unused` lies in the middle, and any cut in three runs through it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.last = (nn.Parameter(torch.ones(size, dtype=torch.float64)) for size in (3, 17, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :3] * self.first, x[:, 3:] * self.last], 1)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.usefixtures("unwritten_memory_is_nan")
def test_a_parameter_without_a_gradient_that_is_cut_between_ranks_gets_zeros(parts: bool, world_size: int) -> None:
    def program(model: nn.Module, turn: Turn) -> Tensor:
        loss = model(turn.tensor(2, 7)).pow(2).sum()
        loss.backward()
        return loss

    check_parity(lambda: nn.Sequential(PartlyUsed(), PartlyUsed()), program, world_size=world_size, parts=parts)


@WORLDS
def test_a_layer_that_is_partly_on_meta_has_the_values_that_there_are(world_size: int) -> None:
    """The others are unloaded until they are loaded."""

    def body(group: ThreadCommunicator) -> None:
        layer = zero3.Zero3Layer(models[group.rank], process_group=process_group(group))
        with pytest.raises(RuntimeError, match="weight"):
            layer(torch.ones(1, 3))
        zero3.load_full_state_dict(layer, {"weight": torch.full((2, 3), 5.0)} if group.rank == 0 else {}, strict=False)
        found = zero3.full_state_dict(layer, rank0_only=False)
        assert torch.equal(found["weight"], torch.full((2, 3), 5.0)) and torch.equal(found["bias"], torch.tensor([7.0, 7.0]))

    models = [nn.Linear(3, 2) for _ in range(world_size)]
    for model in models:
        model.weight = nn.Parameter(torch.empty(2, 3, device="meta"))
        nn.init.constant_(model.bias, 7.0)
    run_ranks(world_size, body)
