"""What `optional` takes, and what it refuses: on all ranks, and nothing has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zero3
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.towers import TOWERS, Block, Seeing, Tower, seeing
from zero3.towers.choosing import choose_towers


def taken(optional: Any) -> list[str]:
    return list(choose_towers(seeing(), optional))


def test_optional_takes_names_classes_modules_predicates_and_lists() -> None:
    model = seeing()
    assert list(choose_towers(model, model.body.audio)) == ["body.audio"]
    assert taken("body.vision") == ["body.vision"]
    assert taken(Tower) == taken(["body.audio", "body.vision"]) == taken(lambda name, module: name in TOWERS) == list(TOWERS)
    assert taken(["body.vision.blocks.0", "body.vision"]) == ["body.vision"]  # the inner one belongs to the outer one
    assert taken("body.language.blocks") == ["body.language.blocks.0", "body.language.blocks.1"]
    assert taken(()) == taken(None) == []


OTHER = nn.Linear(2, 2)
WRONG = {
    "nothing": ("body.ears", "matches no submodule"),
    "a class without modules": (nn.Conv2d, "matches no submodule"),
    "another model's module": (OTHER, "matches no submodule"),
    "a predicate of nothing": (lambda name, module: False, "matches no submodule"),
    "the model itself": (Seeing, "matches the model itself"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_optional_can_t_match_is_an_error_on_all_ranks(what: str) -> None:
    optional, text = WRONG[what]

    def body(group: ThreadCommunicator) -> bool:
        model = seeing()
        given = (optional, TOWERS)[group.rank]  # only one rank is wrong
        with pytest.raises(ValueError, match=f"rank 0: optional=.*{text}"):
            zero3.shard(model, [Block], optional=given, process_group=group)
        return zero3.is_sharded(model)

    assert run_ranks(2, body, 20) == [False, False]


@pytest.mark.parametrize("layers", [Tower, Block])  # what a tower is without `optional`: a layer, or a part of the root's own
def test_ranks_compare_optional(layers: Any) -> None:
    def body(group: ThreadCommunicator) -> None:
        with pytest.raises(ValueError, match=r"ranks differ in what becomes a layer: .*: optional"):
            zero3.shard(seeing(), [layers], optional=TOWERS[: group.rank + 1], process_group=group)

    run_ranks(2, body, 20)


def test_dynamic_and_optional_are_refused_and_dynamic_alone_chooses_nothing() -> None:
    def body(group: ThreadCommunicator) -> tuple[str, ...]:
        policy = zero3.ShardingPolicy(dynamic=True)
        with pytest.raises(ValueError, match=r"optional .*dynamic=True"):
            zero3.shard(seeing(), [Block], optional=TOWERS, policy=policy, process_group=group)
        return zero3.report(zero3.shard(seeing(), [Block], policy=policy, process_group=group)).towers

    assert run_ranks(2, body, 20) == [(), ()]


def test_adapters_in_a_tower_stay_there() -> None:
    """The few parameters that train belong to the root, but for those of towers."""

    def body(group: ThreadCommunicator) -> list[str]:
        model = seeing()
        for name, p in model.named_parameters():
            p.requires_grad_(name.endswith("blocks.0.linear.bias"))
        zero3.shard(model, [Block, nn.Embedding], optional=TOWERS, process_group=group)
        root: Any = model._zero3_root
        return [sharded.sites.name for sharded in root.parameters if sharded.sites.parameter.requires_grad]

    torch.manual_seed(0)
    assert run_ranks(2, body, 20) == [["body.language.blocks.0.linear.bias"]] * 2
