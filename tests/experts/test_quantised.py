"""Experts at home whose weights are quantised: each rank has its own codes and scales, and no others. The reference is one process whose
weights were quantised, and decoded, as a whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zero3
from tests.support.experts import Training, made, tokens
from tests.support.inside import chunks_of
from tests.support.ranks import run_mesh, run_ranks
from zero3.quantized.formats import Format
from zero3.quantized.sections import StoredRows


def base(name: str, info: Any = None) -> bool:
    return name.endswith(("experts.up", "experts.down"))


def frozen(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not base(name))


# experts have 48 elements: with blocks of 32, two of them have bytes together
FORMATS = {
    "NF4": (zero3.NF4(block_size=32, select=base), 4),
    "NF4, plain scales": (zero3.NF4(block_size=32, double_quant=False, select=base), 4),
    "Int8": (zero3.Int8(block_size=16, select=base), 5),
    "Float8": (zero3.Float8(block=(4, 4), select=base), 5),
    "MXFP4": (zero3.MXFP4(select=base), 4),
    "MXFP4, transposed": (zero3.MXFP4(transposed=True, select=base), 4),
}


def policy(name: str = "Int8", **fields: Any) -> zero3.ShardingPolicy:
    return zero3.ShardingPolicy(expert_parallel=True, quantize=FORMATS[name][0], **fields)


@pytest.mark.parametrize("name", FORMATS)
def test_quantised_experts_stay_at_home(name: str) -> None:
    def body(group: Any) -> None:
        training = Training(group, policy(name), FORMATS[name][1], frozen).train(2, micros=2).check()
        for module in training.experts():
            assert module.num_experts == len(module.up)
            assert all(seen[1] < module.num_experts for seen in module.calls)

    run_ranks(2, body)


@pytest.mark.parametrize("fields", [{"offload": "cpu"}, {"reshard_after_forward": False}, {"transactional": True}], ids=str)
def test_quantised_experts_with_other_fields(fields: dict[str, Any]) -> None:
    run_ranks(2, lambda group: Training(group, policy(**fields), 5, frozen).train(2).check())


def test_resident_bytes_hold_what_is_frozen_but_no_experts() -> None:
    def body(group: Any) -> None:
        def prepare(model: torch.nn.Module) -> None:
            frozen(model)
            model.first.requires_grad_(False)  # type: ignore[operator,union-attr]

        model = Training(group, policy(resident_bytes=10**6), 5, prepare).train(2).check().model
        chunks = [chunk for chunk in chunks_of(model) if not chunk.shard.requires_grad]
        experts, others = ([chunk.full.tensor.untyped_storage() for chunk in chunks if chunk.in_part is part] for part in (True, False))
        own = {chunk.shard.untyped_storage().data_ptr() for chunk in chunks}
        assert experts and all(not storage.nbytes() or storage.data_ptr() in own for storage in experts), "beside what the rank has anyway"
        assert sum(storage.nbytes() for storage in others) == 8 * (6 * 6 + 6)

    run_ranks(2, body)


@pytest.mark.parametrize(("ranks", "experts"), [(1, 5), (3, 5), (4, 3)])
def test_quantised_experts_on_more_ranks(ranks: int, experts: int) -> None:
    run_ranks(ranks, lambda group: Training(group, policy(), experts, frozen).train(2).check())


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_quantised_experts_are_recomputed(kind: str) -> None:
    def prepare(model: Any) -> None:
        frozen(model)
        for block in model.blocks:
            block.checkpoints = kind

    run_ranks(2, lambda group: Training(group, policy(), 5, prepare).train(2).check())


def test_quantised_experts_on_a_mesh_with_replicas() -> None:
    run_mesh(2, 2, lambda group: Training(group, policy(), 5, frozen).train(2).check())


def test_a_rank_has_the_codes_of_its_own_experts_alone() -> None:
    """Their bytes are those that the whole tensor's sections have for them, and nothing of them travels."""

    def body(group: Any) -> None:
        training = Training(group, policy("NF4"), 4, frozen)
        before = len(group.log)
        training.train(1)
        assert "all_gather" not in {e.kind for e in group.log[before:] if "experts" in str(e)}
        kind, up = FORMATS["NF4"][0], made(4).blocks[0].experts.up
        whole = kind.quantize(up)
        chunk = next(p for n, p in training.model.named_parameters() if n.endswith("frozen_chunk_of_up"))
        (row,) = kind.rows(tuple(up.shape)).seen(chunk.data.view(1, -1))
        for name in ("codes", "scales"):
            assert row.sections[name].equal(whole.sections[name].chunk(2)[group.rank])
        assert row.scale_scales is not None and whole.scale_scales is not None
        assert set(row.scale_scales.tolist()) <= set(whole.scale_scales.tolist())

    run_ranks(2, body)


@pytest.mark.parametrize(("saved", "loaded"), [((2, True), (3, True)), ((3, True), (2, False)), ((2, False), (2, True))])
def test_checkpoints_of_quantised_experts_load_anywhere(saved: Any, loaded: Any, tmp_path: Any) -> None:
    """On other numbers of ranks, with the option and without."""
    kept = []

    def training(group: Any, at_home: bool) -> Training:
        return Training(group, zero3.ShardingPolicy(expert_parallel=at_home, quantize=FORMATS["Int8"][0]), 5, frozen)

    def save(group: Any) -> None:
        before = training(group, saved[1]).train(1)
        zero3.save_checkpoint(tmp_path / "one", before.model, before.optimizer)
        kept.append(before.plain)

    def load(group: Any) -> None:
        after = training(group, loaded[1])
        zero3.load_checkpoint(tmp_path / "one", after.model, after.optimizer)
        after.plain = kept[0]
        after.check()

    run_ranks(saved[0], save)
    run_ranks(loaded[0], load)


@pytest.mark.parametrize("name", ["NF4", "Int8", "MXFP4"])
@pytest.mark.parametrize("frozen_too", [True, False])
def test_checkpoints_of_version_0_1_load(name: str, frozen_too: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have a quantised parameter's sections one after another, not matrix by matrix; or a hash of them."""
    kind, experts = FORMATS[name]
    saved: list[Any] = []

    def training(group: Any, at_home: bool) -> Training:
        return Training(group, zero3.ShardingPolicy(expert_parallel=at_home, quantize=kind), experts, frozen)

    def save(group: Any) -> None:
        before = training(group, False).train(1)
        zero3.save_checkpoint(tmp_path / "one", before.model, before.optimizer, frozen=frozen_too)
        saved.append(before.plain)

    def load(group: Any) -> None:
        after = training(group, True)
        zero3.load_checkpoint(tmp_path / "one", after.model, after.optimizer)
        after.plain = saved[0]
        after.check()

    with monkeypatch.context() as old:
        old.setattr(Format, "rows", lambda self, shape: _one_row(self, shape))
        old.setattr(Format, "stored", lambda self, shape: (self.nbytes(shape),))
        run_ranks(2, save)
    run_ranks(3, load) if name == "Int8" else run_ranks(2, load)


def _one_row(kind: Format, shape: tuple[int, ...]) -> StoredRows:
    return StoredRows(shape, 1, kind.sections(shape), kind.nbytes(shape), 256, kind.sections(shape))


def test_quantised_experts_are_shown_whole() -> None:
    def body(group: Any) -> None:
        training = Training(group, policy(), 5, frozen).train(1)
        first, plain = next(training.experts()), training.plain.blocks[0].experts
        with zero3.full_params(training.model):
            assert torch.equal(first.up, plain.up)
        exchanged = len(group.log)
        with zero3.resident(training.model), torch.no_grad():
            for number in range(1 + group.rank):  # at its own pace
                torch.testing.assert_close(training.model(tokens(0, number)), training.plain(tokens(0, number)))
        assert "all_to_all" not in {each.kind for each in group.log[exchanged:]}
        training.train(1, first=1).check()

    run_ranks(2, body)


def test_a_block_across_the_border_of_two_ranks_is_refused() -> None:
    def body(group: Any) -> str:
        with pytest.raises(ValueError, match=r"blocks\.0\.experts\.up.*expert_parallel=True.*a block of nf4.*border") as caught:
            Training(group, policy("NF4"), 6, frozen)  # of 3 experts each, and two share bytes
        return str(caught.value)

    assert len(set(run_ranks(2, body))) == 1
