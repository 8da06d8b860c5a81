"""What a model sharded in place holds in the middle of a step, in which order it gathers, and what consolidation holds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.inside import held_bytes, whole_bytes
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn, assert_at_rest
from tests.support.stacks import WIDTH, Block, Stack, built, loss_of, stack, train, words_of
from zero3.checkpoint import full_state


def test_the_middle_of_a_step_holds_neither_the_embedding_nor_the_head() -> None:
    """Measured inside the middle block, in forward and in backward: two or three blocks and the small root, no more."""
    models = [stack(depth=5, words=1000) for _ in range(2)]
    ends = 1000 * WIDTH * 8

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=group)
        seen: dict[str, dict[str, int]] = {}

        def look(module: nn.Module, args: Any, output: Tensor) -> None:
            seen["forward"] = held_bytes(model)
            output.register_hook(lambda gradient: seen.update({"before its backward": held_bytes(model)}))

        model.blocks[2].module.register_forward_hook(look)
        model.blocks[2].module.up.register_full_backward_hook(lambda *_: seen.update({"in its backward": held_bytes(model)}))
        for _ in range(3):  # the first learns the order, so it fetches nothing ahead
            train(model, Turn(group.rank, 0, 2))
        assert set(seen) == {"forward", "before its backward", "in its backward"}
        for where, sizes in seen.items():
            assert "blocks.2" in sizes and "root" in sizes, (where, sizes)
            assert not {"embed", "head"} & set(sizes), (where, sizes)
            assert len(sizes) <= 4 and sum(sizes.values()) < ends / 10, (where, sizes)
        assert set(seen["forward"]) == {"root", "blocks.2", "blocks.3"}
        assert set(seen["in its backward"]) == {"root", "blocks.2", "blocks.1"}
        assert_at_rest(model)

    run_ranks(2, body)


# -- order


class Choosy(Stack):
    """Goes through its blocks in the order that it is told."""

    order: tuple[int, ...] = (0, 1, 2, 3)

    def through_blocks(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x


def in_orders(group: ThreadCommunicator, model: Choosy, orders: list[tuple[int, ...]]) -> tuple[list[list[str]], list[int]]:
    """For each order one evaluation: what was gathered (by block) and run, in turn; and how many words ranks exchanged."""
    sizes = {nbytes // 8: name for name, nbytes in whole_bytes(model).items()}
    events: list[str] = []
    for index in range(len(model.blocks)):
        model.blocks[index].module.register_forward_pre_hook(lambda module, args, index=index: note(f"run {index}"))
    position = 0

    def note(event: str) -> None:
        nonlocal position
        gathered = [line for line in group.log[position:] if line.kind == "all_gather"]
        events.extend(f"get {sizes.get(line.numel, 'root')}".replace("blocks.", "") for line in gathered)
        position = len(group.log)
        events.append(event)

    found, words = [], []
    for order in orders:
        model.order, position = order, len(group.log)
        before = len(group.log)
        events.clear()
        with torch.no_grad():
            model(words_of(Turn(0, 0, 1)))
        found.append([event for event in events if event[-1].isdigit()])
        words.append(sum(line.kind == "exchange" for line in group.log[before:]))
        assert_at_rest(model)
    return found, words


def test_the_order_is_learned_used_and_learned_anew() -> None:
    models = [built(lambda: Choosy(*[Block(hidden) for hidden in (7, 8, 9, 12)])) for _ in range(2)]
    forth, back = (0, 1, 2, 3), (3, 1, 0)
    one_by_one = [f"{what} {i}" for i in forth for what in ("get", "run")]
    ahead = ["get 0", "get 1", "run 0", "get 2", "run 1", "get 3", "run 2", "run 3"]
    ahead_back = ["get 3", "get 1", "run 3", "get 0", "run 1", "run 0"]

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=group)
        found, words = in_orders(group, model, [forth, forth, forth, back, back, forth, back])
        assert found[0] == one_by_one and words[0] == 7, "one word for each of the root, the ends and the blocks"
        for step in (1, 2):
            assert found[step] == ahead and words[step] == 0, "from then on one ahead, and not a word"
        assert [event for event in found[3] if event.startswith("run")] == ["run 3", "run 1", "run 0"], "another order is followed"
        assert words[3] > 0
        assert found[4] == ahead_back and words[4] == 0, "and prefetching adapts"
        for step, order in ((5, forth), (6, back)):
            assert [event for event in found[step] if event.startswith("run")] == [f"run {i}" for i in order]
            assert words[step] <= 1, "a turn between known orders costs one word at most"

    run_ranks(2, body)


# -- consolidation


def test_full_state_dict_holds_one_layer_at_a_time() -> None:
    models = [stack(depth=4, words=200) for _ in range(3)]
    plain = stack(depth=4, words=200).state_dict()

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=group)
        most: list[int] = []
        group.before = lambda kind: most.append(len(held_bytes(model)))
        saved = zero3.full_state_dict(model)
        zero3.load_full_state_dict(model, saved)
        assert len(most) >= 14 and max(most) <= 1
        assert saved.keys() == (set() if group.rank else plain.keys())
        assert_at_rest(model)

    run_ranks(3, body)


def test_full_state_dict_shows_its_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    model = zero3.shard(stack())
    zero3.full_state_dict(model)
    assert capsys.readouterr().err == "", "short"
    monkeypatch.setattr(full_state, "_LONG", 0)
    saved = zero3.full_state_dict(model)
    assert capsys.readouterr().err == "", "no terminal"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    zero3.full_state_dict(model)
    shown = capsys.readouterr().err
    assert "zero3: gathering layers" in shown and "B/s" in shown and shown.endswith("\r"), "it leaves the line empty"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    zero3.load_full_state_dict(model, saved)
    assert "zero3: loading layers" in capsys.readouterr().err


# -- parts of a model, whole


PARTS: dict[str, tuple[Callable[[Stack], nn.Module], set[str]]] = {
    "a layer": (lambda m: m.head, {"head"}),
    "a part of a layer": (lambda m: m.blocks[1].up, {"blocks.1"}),
    "a part of the root": (lambda m: m.norm, {"root"}),
    "the list of blocks": (lambda m: m.blocks, {"blocks.0", "blocks.1", "blocks.2"}),
    "all": (lambda m: m, {"embed", "blocks.0", "blocks.1", "blocks.2", "head", "root"}),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("writeback", [False, True])
def test_full_params_of_a_part_gathers_that_part(part: str, writeback: bool) -> None:
    find, layers = PARTS[part]
    models, plain = [stack() for _ in range(2)], stack()
    expected = {key: value.clone() for key, value in plain.state_dict().items()}
    if writeback:
        prefix = next(name for name, module in plain.named_modules() if module is find(plain))
        inside = {f"{prefix}.{key}".lstrip(".") for key in find(plain).state_dict()}
        expected = {key: value * 2 if key in inside else value for key, value in expected.items()}

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        model = zero3.shard(models[group.rank], process_group=group)
        module = find(model)
        with zero3.full_params(module, writeback=writeback), torch.no_grad():
            assert set(held_bytes(model)) == layers
            assert [name for name, _ in module.named_parameters()] == [name for name, _ in find(plain).named_parameters()]
            for parameter in module.parameters():
                parameter.mul_(2 if group.rank == 0 else 3)  # rank 0's values win
        assert_at_rest(model)
        assert torch.isfinite(loss_of(model, Turn(0, 0, 1)))
        return zero3.full_state_dict(model)

    saved = run_ranks(2, body)[0]
    assert list(saved) == list(expected)
    assert all(torch.equal(saved[key], value) for key, value in expected.items())


def test_load_full_state_dict_that_does_not_fit_changes_nothing() -> None:
    models = [stack(tied=True) for _ in range(2)]

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=group)
        before = zero3.full_state_dict(model)
        wrong = {**before, "more": torch.zeros(1)} if group.rank == 0 else {}
        wrong.pop("norm.bias", None)
        if group.rank == 0:
            wrong["blocks.0.up.bias"] = torch.zeros(3)
        with pytest.raises(ValueError, match=r"(?s)norm\.bias.*more.*blocks\.0\.up\.bias"):
            zero3.load_full_state_dict(model, wrong)
        assert_at_rest(model)
        after = zero3.full_state_dict(model)
        assert all(torch.equal(after[key], value) for key, value in before.items())

    run_ranks(2, body)
