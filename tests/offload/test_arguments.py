"""What is no place to rest, or of a wrong type, is refused: each error says what was found and what is expected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero3
from zero3.__main__ import main

EXPECTED = 'offload must be "cpu", a directory or None'
PLACES: dict[str, tuple[Callable[[Any], object], str]] = {
    "ShardingPolicy": (lambda place: zero3.ShardingPolicy(offload=place), EXPECTED),
    "offload_activations": (lambda place: zero3.offload_activations(place), 'to must be "cpu" or a directory'),
}
NO_PLACES = ["gpu", "cuda", "cuda:0", "disk", "nvme", "NVMe", "CPU", "cpu:0", "none", "None", "ssd"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("taker", PLACES)
@pytest.mark.parametrize("word", NO_PLACES)
def test_a_mistaken_keyword_is_refused_unless_there_is_such_a_directory(taker: str, word: str) -> None:
    take, expected = PLACES[taker]
    with pytest.raises(ValueError, match=rf'^{expected}, found \'{word}\'\. Did you mean "cpu", or a directory such as \'\./{word}\'\?$'):
        take(word)
    Path(word).mkdir()
    for place in (word, f"./{word}", Path(word)):
        take(place)


@pytest.mark.parametrize("word", ["gpu", "nvme"])
def test_so_it_is_on_the_command_line(word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path), "--ranks", "2", "--offload", word]) == 2
    assert f"{EXPECTED}, found '{word}'. Did you mean \"cpu\", or a directory such as './{word}'?" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["gpu", "./gpu", "/somewhere/gpu"])
def test_a_path_that_does_not_exist_is_an_error_of_its_use_as_before(place: str) -> None:
    """A policy may be made on another machine than the one that has the directory."""
    if place == "gpu":
        zero3.ShardingPolicy(offload=Path(place))
    else:
        zero3.ShardingPolicy(offload=place)
    with pytest.raises(ValueError, match="can't hold what is offloaded"):
        zero3.offload_activations(Path(place))


@pytest.mark.parametrize("taker", PLACES)
@pytest.mark.parametrize("wrong", [1, True, b"/tmp", bytearray(b"cpu"), ["/tmp"], torch.device("cpu")])
def test_what_is_no_text_and_no_path(taker: str, wrong: Any) -> None:
    take, expected = PLACES[taker]
    with pytest.raises(TypeError) as caught:
        take(wrong)
    assert str(caught.value) == f"{expected}, found {wrong!r}"


@pytest.mark.parametrize("wrong", ["x", None, 1.5, True, b"1"])
def test_min_bytes_of_a_wrong_type(wrong: Any) -> None:
    with pytest.raises(TypeError) as caught:
        zero3.offload_activations(min_bytes=wrong)
    assert str(caught.value) == f"min_bytes must be an integer, found {wrong!r}"


def test_min_bytes_below_zero() -> None:
    with pytest.raises(ValueError, match=r"^min_bytes must be 0 or more, found -1$"):
        zero3.offload_activations(min_bytes=-1)


@pytest.mark.parametrize("wrong", [1, None, "yes"])
def test_in_backward_of_a_wrong_type(wrong: Any) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(TypeError, match=f"^in_backward must be True or False, found {wrong!r}$"):
        zero3.offload_optimizer(optimizer, in_backward=wrong)
    assert "step" not in vars(optimizer)


@pytest.mark.parametrize("wrong", [None, "AdamW", torch.optim.SGD, []])
def test_what_is_no_optimizer(wrong: Any) -> None:
    kind = type(wrong).__name__
    with pytest.raises(TypeError, match=f"^expected a torch.optim.Optimizer, found a {kind}: call it for each optimizer"):
        zero3.offload_optimizer(wrong)
