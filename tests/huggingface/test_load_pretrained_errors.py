"""load_pretrained: what does not fit is one error on every rank and changes nothing; what fails later is never trained on."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support import disk
from tests.support.architectures import ARCHITECTURES
from tests.support.pretrained import SINGLE, TURN, assert_same_bits, on_meta, rewritten, saved
from tests.support.ranks import ThreadCommunicator, run_ranks
from zero3.checkpoint import safetensors_files

INPUTS = ARCHITECTURES["Llama"].inputs(TURN)


def error_of(load: Callable[[int, nn.Module], None], world_size: int = 2, name: str = "Llama") -> Exception:
    """What every rank raised, the same; the model, which has values, has them still, and computes with them."""
    models = [ARCHITECTURES[name].build() for _ in range(world_size)]

    def body(group: ThreadCommunicator) -> Exception:
        model = zero3.shard(models[group.rank], process_group=group)
        loss = model(**INPUTS).loss.item()
        before = [chunk.detach().clone() for chunk in zero3.get_trainable_chunk(model)]
        with pytest.raises((ValueError, TypeError, RuntimeError)) as raised:
            load(group.rank, model)
        assert all(torch.equal(chunk, old) for chunk, old in zip(zero3.get_trainable_chunk(model), before, strict=True))
        assert model(**INPUTS).loss.item() == loss
        return raised.value

    errors = run_ranks(world_size, body)
    assert len({(type(error), str(error)) for error in errors}) == 1
    return errors[0]


@pytest.mark.parametrize("world_size", [1, 3])
def test_all_that_does_not_fit_is_one_error(world_size: int, tmp_path: Path) -> None:
    saved("Llama", tmp_path)

    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2)
        tensors["visual"] = torch.zeros(2)
        tensors["lm_head.weight"] = torch.zeros(3, 4)
        tensors["model.embed_tokens.weight"] = torch.zeros(96, 16, dtype=torch.int32)

    rewritten(tmp_path, change)
    text = str(error_of(lambda rank, model: zero3.load_pretrained(model, tmp_path), world_size))
    assert "does not fit this LlamaForCausalLM; nothing was loaded" in text
    assert "missing: model.layers.1.mlp.up_proj.weight, model.norm.weight. " in text
    assert "unexpected: model.layers.7.mlp.up_proj.weight, visual. " in text
    assert "lm_head.weight has (3, 4), expected (96, 16)" in text
    assert "model.embed_tokens.weight is integer (torch.int32), expected floating (torch.float64)" in text


def truncated(directory: Path) -> None:
    data = (directory / SINGLE).read_bytes()
    (directory / SINGLE).write_bytes(data[:-100])


def corrupt(directory: Path) -> None:
    data = bytearray((directory / SINGLE).read_bytes())
    data[20] = 0xFF
    (directory / SINGLE).write_bytes(data)


def outside(directory: Path) -> None:
    (directory / SINGLE).rename(directory.parent / SINGLE)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": f"../{SINGLE}"}}))


def empty(directory: Path) -> None:
    (directory / SINGLE).unlink()


def float8(directory: Path) -> None:
    rewritten(directory, lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].to(torch.float8_e4m3fn)}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncated, "rank 0: .* is cut off or corrupt"),
        (corrupt, "rank 0: .* is corrupt, its header is not the JSON"),
        (outside, r"'lm_head\.weight' is said to be in '\.\./model\.safetensors'"),
        (empty, r"holds neither model\.safetensors nor"),
        (float8, r"model\.norm\.weight is float8 .*, expected floating"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_damaged_checkpoint(damage: Callable[[Path], None], message: str, strict: bool, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    saved("Llama", tmp_path / "model")
    damage(tmp_path / "model")
    error = error_of(lambda rank, model: zero3.load_pretrained(model, tmp_path / "model", strict=strict))
    assert isinstance(error, ValueError)
    assert error_matches(error, message)


def error_matches(error: Exception, message: str) -> bool:
    with pytest.raises(type(error), match=message):
        raise error
    return True


@pytest.mark.parametrize("strict", [True, False])
def test_one_parameter_under_two_names(strict: bool, tmp_path: Path) -> None:
    saved("Llama", tmp_path)
    rewritten(tmp_path, lambda tensors: tensors.update({"norm.weight": tensors["model.norm.weight"].clone()}))
    error = error_of(lambda rank, model: zero3.load_pretrained(model, tmp_path, strict=strict))
    assert error_matches(error, r"stored twice: model\.norm\.weight, as model\.norm\.weight and as norm\.weight")


def test_ranks_that_see_different_files(tmp_path: Path) -> None:
    for rank in range(2):
        saved("Llama", tmp_path / str(rank), dtype=[torch.float32, torch.float64][rank])
    error = error_of(lambda rank, model: zero3.load_pretrained(model, tmp_path / str(rank)))
    assert error_matches(error, r"ranks differ in the files that load_pretrained found: rank 0: .* bytes, header .*; rank 1: ")
    (tmp_path / "1" / SINGLE).unlink()
    error = error_of(lambda rank, model: zero3.load_pretrained(model, tmp_path / str(rank)))
    assert error_matches(error, r"rank 1: .* holds neither")


def test_one_path_with_other_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on machines with disks of their own."""
    saved("Llama", tmp_path)
    add = safetensors_files.SafetensorsFiles._add
    turns = iter(range(2))

    def add_another(self: safetensors_files.SafetensorsFiles, name: str) -> None:
        add(self, name)
        self.listing[-1] += f", {next(turns)}"

    monkeypatch.setattr(safetensors_files.SafetensorsFiles, "_add", add_another)
    error = error_of(lambda rank, model: zero3.load_pretrained(model, tmp_path))
    assert error_matches(error, r"ranks differ in the files that .* found: rank \d: model\.safetensors: \d+ bytes, header \w+, \d; rank")


def test_misuse(tmp_path: Path) -> None:
    saved("Llama", tmp_path)
    assert isinstance(error_of(lambda rank, model: zero3.load_pretrained(model, 3)), TypeError)

    def inside(rank: int, model: nn.Module) -> None:
        with zero3.full_params(model):
            zero3.load_pretrained(model, tmp_path)

    assert error_matches(error_of(inside), "load_pretrained inside full_params or resident: layer .* is whole there")
    with pytest.raises(ValueError, match="nothing in this Linear is sharded"):
        zero3.load_pretrained(nn.Linear(2, 2), tmp_path)


def test_a_tied_parameter_with_two_values(tmp_path: Path) -> None:
    saved("GPT-2", tmp_path)
    rewritten(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["transformer.wte.weight"] + 1e-9}))
    error = error_of(lambda rank, model: zero3.load_pretrained(model, tmp_path), name="GPT-2")
    assert error_matches(error, r"transformer\.wte\.weight and lm_head\.weight are one parameter in this model, but .* two values.*Untie")


def test_what_is_not_named_is_left_alone_if_not_strict(tmp_path: Path) -> None:
    expected = saved("Llama", tmp_path)
    values = expected.state_dict()
    dropped = ["model.layers.0.mlp.up_proj.weight", "lm_head.weight"]

    def change(tensors: dict[str, Tensor]) -> None:
        for name in dropped:
            del tensors[name]
        tensors["visual"] = torch.zeros(2)

    rewritten(tmp_path, change)
    models = [(ARCHITECTURES["Llama"].build(), on_meta(expected)) for _ in range(2)]

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        with_values, empty_model = (zero3.shard(model, process_group=group) for model in models[group.rank])
        for parameter in with_values.parameters():
            parameter.data.fill_(0.5)
        zero3.load_pretrained(with_values, tmp_path, strict=False)
        zero3.load_pretrained(empty_model, tmp_path, strict=False)
        with pytest.raises(RuntimeError, match=r"layer 'model\.layers\.0' .* has no values yet for: parameter mlp\.up_proj\.weight\. They"):
            empty_model(**INPUTS)
        with pytest.raises(RuntimeError, match=r"has no values yet for: parameter mlp\.up_proj\.weight"):
            zero3.full_state_dict(empty_model)
        zero3.load_full_state_dict(empty_model, {name: values[name] for name in dropped}, strict=False)
        assert_same_bits(zero3.full_state_dict(empty_model, rank0_only=False), values)
        return zero3.full_state_dict(with_values, rank0_only=False)

    for state in run_ranks(2, body):
        assert_same_bits(state, {name: torch.full_like(v, 0.5) if name in dropped else v for name, v in values.items()})


@pytest.mark.parametrize("failure", [OSError(5, "Input/output error"), None], ids=["error", "end of file"])
def test_a_read_that_fails_half_way(failure: OSError | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's disk fails: both raise, and neither trains on half a model. Loading again is all it takes."""
    expected = saved("Llama", tmp_path)
    models = [ARCHITECTURES["Llama"].build() for _ in range(2)]
    left = [20]

    def failing(file: FileIO, offset: int, into: memoryview) -> int:
        left[0] -= 1
        if left[0] == 0:
            if failure is not None:
                raise failure
            return 0
        return disk.read(file, offset, into)

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        model = zero3.shard(models[group.rank], process_group=group)
        with pytest.raises(RuntimeError, match=r"rank \d: reading .* failed: .*What it was to fill is unloaded now"):
            zero3.load_pretrained(model, tmp_path)
        with pytest.raises(RuntimeError, match="has no values yet"):
            model(**INPUTS)
        zero3.load_pretrained(model, tmp_path)
        return zero3.full_state_dict(model, rank0_only=False)

    with disk.reading(failing):
        found = run_ranks(2, body)
    for state in found:
        assert_same_bits(state, expected.state_dict())


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_graph_from_before_is_stale_and_training_goes_on(world_size: int, tmp_path: Path) -> None:
    expected = saved("Llama", tmp_path)
    models = [ARCHITECTURES["Llama"].build() for _ in range(world_size)]

    def body(group: ThreadCommunicator) -> Tensor:
        model = zero3.shard(models[group.rank], process_group=group)
        optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), 0.1)
        old = model(**INPUTS).loss
        zero3.load_pretrained(model, tmp_path)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()
        optimizer.zero_grad()
        loss = model(**INPUTS).loss
        loss.backward()
        optimizer.step()
        assert model(**INPUTS).loss < loss
        return loss.detach()

    for loss in run_ranks(world_size, body):
        torch.testing.assert_close(loss, expected(**INPUTS).loss.detach())
