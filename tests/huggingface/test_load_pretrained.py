"""load_pretrained: models on meta filled from safetensors directories, each rank reading its own bytes; mistakes change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import zero3
from tests.support import disk
from tests.support.architectures import ARCHITECTURES, WORDS
from tests.support.models import WORLDS
from tests.support.pretrained import SINGLE, TURN, assert_same_bits, loaded, on_meta, rewritten, saved
from tests.support.ranks import ThreadCommunicator, run_ranks


@pytest.mark.parametrize("shard_size", ["5GB", "6KB"], ids=["one file", "many"])
@pytest.mark.parametrize("name", ARCHITECTURES)
@WORLDS
def test_a_model_on_meta_becomes_the_one_that_was_saved(name: str, world_size: int, shard_size: str, tmp_path: Path) -> None:
    """Values, ties, buffers and outputs are those of from_pretrained. Before, a forward says what lacks."""
    expected = saved(name, tmp_path, shard_size)
    assert (tmp_path / SINGLE).exists() == (shard_size == "5GB")
    inputs = ARCHITECTURES[name].inputs(TURN)
    models = [on_meta(expected) for _ in range(world_size)]

    def body(group: ThreadCommunicator) -> tuple[dict[str, Tensor], Tensor]:
        model = zero3.shard(models[group.rank], process_group=group)
        with pytest.raises(RuntimeError, match=r"layer the root .* has no values yet for: parameter .*zero3\.load_pretrained"):
            model(**inputs)
        zero3.load_pretrained(model, tmp_path)
        with torch.no_grad():
            logits = model(**inputs).logits
        return zero3.full_state_dict(model, rank0_only=False), logits

    results = run_ranks(world_size, body)
    with torch.no_grad():
        logits = expected(**inputs).logits
    for state, found in results:
        assert_same_bits(state, expected.state_dict())
        torch.testing.assert_close(found, logits, rtol=0, atol=ARCHITECTURES[name].tolerance * 10)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32, torch.float64])
def test_values_are_converted(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    expected = saved("Llama", tmp_path, dtype=stored).to(wanted)
    for state in loaded(expected, tmp_path, 2):
        assert_same_bits(state, expected.state_dict())


@contextmanager
def spy() -> Iterator[list[tuple[str, int, int]]]:
    """Every read of tensors' bytes, by all ranks: file, first byte, number of bytes. A tensor takes several."""
    reads: list[tuple[str, int, int]] = []

    def watched(file: FileIO, offset: int, into: memoryview) -> int:
        count = disk.read(file, offset, into)
        reads.append((Path(str(file.name)).name, offset, count))
        return count

    with disk.reading(watched, at_once=256):
        yield reads


@pytest.mark.parametrize("shard_size", ["5GB", "6KB"], ids=["one file", "many"])
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "Mixtral", "Whisper"])
@WORLDS
def test_every_byte_is_read_once_by_all_ranks_together(
    name: str, world_size: int, shard_size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = saved(name, tmp_path, shard_size)
    with spy() as reads:
        loaded(expected, tmp_path, world_size)
    for path in tmp_path.glob("*.safetensors"):
        spans = sorted((offset, offset + count) for file, offset, count in reads if file == path.name)
        begin = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        assert [start for start, _ in spans] == [begin, *(stop for _, stop in spans[:-1])]
        assert spans[-1][1] == path.stat().st_size


def layers() -> list[nn.Module]:
    """Layers with a buffer each, of odd sizes; an LSTM, which keeps a list of its parameters."""
    return [nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7)), nn.LSTM(7, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))]


class First(nn.Module):
    def forward(self, x: Any) -> Any:
        return x[0]


def sequential(group: Any, *, meta: bool) -> zero3.Zero3Sequential:
    with torch.device("meta" if meta else "cpu"):
        modules = [layers()[0], nn.Sequential(layers()[1], First()), layers()[2]]
    return zero3.Zero3Sequential([zero3.Zero3Layer(module, process_group=group) for module in modules])


@WORLDS
def test_a_zero3sequential_on_meta(world_size: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(layers()[0], nn.Sequential(layers()[1], First()), layers()[2])
    plain(torch.randn(9, 5))  # so that its buffers are not what a new module has
    plain.eval()
    save_file(plain.state_dict(), tmp_path / SINGLE)
    x = torch.randn(4, 5)

    def body(group: ThreadCommunicator) -> tuple[dict[str, Tensor], Tensor]:
        model = sequential(group, meta=True).eval()
        assert all(chunk.device.type == "cpu" for chunk in model.parameters())
        zero3.load_pretrained(model, str(tmp_path))
        return zero3.full_state_dict(model, rank0_only=False), model(x)

    for state, output in run_ranks(world_size, body):
        assert_same_bits(state, plain.state_dict())
        torch.testing.assert_close(output, plain(x))


@WORLDS
def test_load_full_state_dict_with_rank_0_of_values_and_the_others_on_meta(world_size: int) -> None:
    """No file: construction scatters rank 0's. What is on meta there waits, alone in its chunk."""
    model = ARCHITECTURES["Llama"].build()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.to("meta"))
    model.model.layers[1].mlp.up_proj.weight = nn.Parameter(model.model.layers[1].mlp.up_proj.weight.to("meta"))
    models = [model, *(on_meta(model) for _ in range(1, world_size))]
    inputs = ARCHITECTURES["Llama"].inputs(TURN)

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        own = zero3.shard(models[group.rank], process_group=group, device="cpu")
        with pytest.raises(RuntimeError, match=r"has no values yet for: parameter (mlp\.up_proj\.)?weight\. They"):
            own(**inputs)
        missing = ["lm_head.weight", "model.layers.1.mlp.up_proj.weight"]
        zero3.load_full_state_dict(own, {name: expected[name] for name in missing}, strict=False)
        own(**inputs)
        return zero3.full_state_dict(own, rank0_only=False)

    for state in run_ranks(world_size, body):
        assert_same_bits(state, expected)


def test_load_full_state_dict_fills_a_model_on_meta_too() -> None:
    """Its buffers included: those that a state dict holds, and those that only the model can compute."""
    expected, other = ARCHITECTURES["Llama"].build(), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    inputs = ARCHITECTURES["Llama"].inputs(TURN)

    def body(group: ThreadCommunicator) -> Tensor:
        module = nn.Sequential(nn.Linear(3, 3, device="meta"), nn.BatchNorm1d(3, device="meta")).double()
        layer = zero3.Zero3Layer(module, process_group=group)
        zero3.load_full_state_dict(layer, other.state_dict())
        assert_same_bits(zero3.full_state_dict(layer, rank0_only=False), other.state_dict())
        model = zero3.shard(on_meta(expected), process_group=group)
        zero3.load_full_state_dict(model, expected.state_dict() if group.rank == 0 else None)
        return model(**inputs).loss

    for loss in run_ranks(2, body):
        torch.testing.assert_close(loss, expected(**inputs).loss)


def test_the_meta_device_is_no_place_to_compute() -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=r"can't compute on the meta device.*wrap it outside"):
        zero3.Zero3Layer(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="can't compute on the meta device"):
        zero3.Zero3Layer(nn.Linear(2, 2), device="meta")


def test_old_buffers_in_a_checkpoint_are_left_alone(tmp_path: Path) -> None:
    """What models once stored and now compute; transformers ignores it as well."""
    expected = saved("GPT-NeoX", tmp_path)
    old = {"attention.rotary_emb.inv_freq": torch.zeros(4), "attention.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool)}
    rewritten(tmp_path, lambda tensors: tensors.update({f"gpt_neox.layers.0.{name}": value for name, value in old.items()}))
    for state in loaded(expected, tmp_path, 2):
        assert_same_bits(state, expected.state_dict())


@WORLDS
def test_a_buffer_that_the_model_computes_for_its_layers(world_size: int, tmp_path: Path) -> None:
    """Falcon-H1 registers `mup_vector` in modules that can't compute it."""
    import transformers

    sizes = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    mamba = {"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_chunk_size": 4}
    more = {"num_key_value_heads": 1, "head_dim": 8, "ssm_multipliers": [2.0, 3.0, 5.0, 7.0, 11.0]}
    plain = transformers.FalconH1ForCausalLM(transformers.FalconH1Config(**sizes, **mamba, **more)).eval()
    plain.save_pretrained(tmp_path)
    expected = transformers.FalconH1ForCausalLM.from_pretrained(tmp_path).eval()
    models = [on_meta(plain) for _ in range(world_size)]
    ids = torch.arange(8)[None]

    def body(group: ThreadCommunicator) -> Tensor:
        model = zero3.shard(models[group.rank], process_group=group, device="cpu")
        zero3.load_pretrained(model, tmp_path)
        assert_same_bits(dict(model.named_buffers()), dict(expected.named_buffers()))
        with torch.no_grad():
            return model(input_ids=ids).logits

    assert len({float(x) for x in expected.model.layers[0].mamba.mup_vector.flatten()}) == 5
    with torch.no_grad():
        logits = expected(input_ids=ids).logits
    for found in run_ranks(world_size, body):
        torch.testing.assert_close(found, logits)


@WORLDS
def test_padding_is_zero_before_loading_and_after(world_size: int, tmp_path: Path) -> None:
    plain = nn.Linear(3, 2).double()
    save_file(plain.state_dict(), tmp_path / SINGLE)

    def body(group: ThreadCommunicator) -> Tensor:
        torch.use_deterministic_algorithms(True)  # new memory is NaN
        layer = zero3.Zero3Layer(nn.Linear(3, 2, device="meta").double(), process_group=group)
        (chunk,) = layer.get_trainable_chunk()
        padding = chunk[max(0, 8 - group.rank * chunk.numel()) :]
        assert not padding.any()
        zero3.load_pretrained(layer, tmp_path)
        return chunk.detach()

    try:
        chunks = torch.cat(run_ranks(world_size, body))
    finally:
        torch.use_deterministic_algorithms(False)
    assert not chunks[8:].any()
    assert sorted(chunks[:8].tolist()) == sorted([*plain.weight.flatten().tolist(), *plain.bias.tolist()])
