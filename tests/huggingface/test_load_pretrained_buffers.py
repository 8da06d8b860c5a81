"""load_pretrained, and buffers that files do not hold: they are computed again, or named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import zero3
from tests.support.pretrained import SINGLE, assert_same_bits, on_meta
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import process_group


@pytest.mark.parametrize(
    ("buffer", "unexpected"), [("inv_freq", ["position_ids"]), ("position_ids", ["rotary_emb.inv_freq"]), ("other", None)]
)
def test_buffers_that_were_stored_once_are_passed_over_where_the_model_has_them(
    buffer: str, unexpected: list[str] | None, tmp_path: Path
) -> None:
    model = nn.Module()
    model.rotary_emb, model.linear = nn.Module(), nn.Linear(2, 2)
    model.rotary_emb.register_buffer(buffer, torch.ones(2), persistent=False)
    values = {**nn.Linear(2, 2).state_dict(prefix="linear."), "rotary_emb.inv_freq": torch.ones(2), "position_ids": torch.ones(2)}
    save_file(values, tmp_path / SINGLE)
    named = ", ".join(unexpected or ["position_ids", "rotary_emb.inv_freq"])
    with pytest.raises(ValueError, match=rf"unexpected: {named}$"):
        zero3.load_pretrained(zero3.shard(model, layers=[model.linear]), tmp_path)


class Table(nn.Module):
    """A buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.table


class TableThatResets(Table):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        self.table.copy_(torch.arange(3.0))


def test_buffers_that_no_checkpoint_holds(tmp_path: Path) -> None:
    save_file({"weight": torch.full((3,), 2.0)}, tmp_path / SINGLE)
    with torch.device("meta"):
        silent, resets = Table(), TableThatResets()
    layer = zero3.Zero3Layer(resets)
    zero3.load_pretrained(layer, tmp_path)
    assert layer(torch.ones(3)).tolist() == [2.0, 3.0, 4.0]
    layer = zero3.Zero3Layer(silent)
    zero3.load_pretrained(layer, tmp_path)
    with pytest.raises(RuntimeError, match=r"has no values yet for: buffer table.*give a buffer that no checkpoint holds to its module"):
        layer(torch.ones(3))
    silent.table = torch.zeros(3)
    assert layer(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]


class ResetsOthers(nn.Module):
    """Sets, in modules further down, what they can't compute themselves; and in one that can, something else."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Table(), nn.Sequential(TableThatResets()))

    def reset_parameters(self) -> None:
        self.inner[0].table.copy_(torch.full((3,), 5.0))
        self.inner[1][0].table.copy_(torch.full((3,), 7.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("layers", [[Table], [nn.Sequential], [Table, TableThatResets]])
def test_buffers_that_a_module_further_out_computes(world_size: int, layers: list[type[nn.Module]], tmp_path: Path) -> None:
    """A module's own word counts first; whoever is asked sees no values but those that are wanted."""
    save_file({"inner.0.weight": torch.full((3,), 2.0), "inner.1.0.weight": torch.full((3,), 3.0)}, tmp_path / SINGLE)
    with torch.device("meta"):
        models = [ResetsOthers() for _ in range(world_size)]

    def body(group: ThreadCommunicator) -> list[list[float]]:
        model = zero3.shard(models[group.rank], layers, process_group=process_group(group), device="cpu")
        zero3.load_pretrained(model, tmp_path)
        return [model(torch.ones(3)).tolist(), *(buffer.tolist() for buffer in model.buffers())]

    for found in run_ranks(world_size, body):
        assert found == [[21.0, 22.0, 23.0], [5.0] * 3, [0.0, 1.0, 2.0]]


def leaving_out(kind: type[nn.Module], group: ThreadCommunicator) -> nn.Module:
    """Layers of this kind on meta, in a model that says of their weights that its files may lack them."""
    with torch.device("meta"):
        model = nn.Sequential(kind(), kind())
    model._keys_to_ignore_on_load_missing = [r"weight"]  # type: ignore[assignment]
    return zero3.shard(model, [kind], process_group=process_group(group), device="cpu")


def test_load_pretrained_computes_what_files_leave_out(tmp_path: Path) -> None:
    """What they hold all the same counts; what the model can't compute either is an error, and otherwise left alone."""
    save_file({"1.weight": torch.full((3,), 4.0)}, tmp_path / SINGLE)

    def body(group: ThreadCommunicator) -> None:
        model = leaving_out(TableThatResets, group)
        zero3.load_pretrained(model, tmp_path)
        assert [v.tolist() for v in zero3.full_state_dict(model, rank0_only=False).values()] == [[1.0] * 3, [4.0] * 3]
        zero3.load_full_state_dict(model, {"0.weight": torch.full((3,), 6.0)}, strict=False)
        zero3.load_pretrained(model, tmp_path)  # has values: they stay
        assert [v.tolist() for v in zero3.full_state_dict(model, rank0_only=False).values()] == [[6.0] * 3, [4.0] * 3]
        silent = leaving_out(Table, group)
        with pytest.raises(ValueError, match=r"nothing was loaded\. missing, and not computed by the model either: 0\.weight$"):
            zero3.load_pretrained(silent, tmp_path)
        zero3.load_pretrained(silent, tmp_path, strict=False)
        with pytest.raises(RuntimeError, match="has no values yet for: parameter weight"):
            silent[0](torch.ones(3))

    run_ranks(2, body)


@pytest.mark.parametrize("world_size", [1, 3])
def test_load_pretrained_of_a_model_whose_files_hold_no_positions(world_size: int, tmp_path: Path) -> None:
    """Marian's are sinusoidal, and transformers leaves them out of its files."""
    import transformers

    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    more = {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": 30, "decoder_vocab_size": 30, "max_position_embeddings": 12}
    plain = transformers.MarianMTModel(transformers.MarianConfig(**sizes, **more, pad_token_id=0, decoder_start_token_id=0))
    plain.save_pretrained(tmp_path)
    expected = transformers.MarianMTModel.from_pretrained(tmp_path)
    assert expected.model.encoder.embed_positions.weight.std() > 0.1
    models = [on_meta(plain) for _ in range(world_size)]

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        model = zero3.shard(models[group.rank], process_group=process_group(group), device="cpu")
        zero3.load_pretrained(model, tmp_path)
        return zero3.full_state_dict(model, rank0_only=False)

    for found in run_ranks(world_size, body):
        assert_same_bits(found, expected.state_dict())
