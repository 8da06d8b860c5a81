"""What a notebook shows of a report, a check and a profile: the texts that print() has, as tables."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch import nn

import zero3
from zero3.diagnose.check import CheckReport, Difference
from zero3.tables import table


class Cells(HTMLParser):
    """The texts of a page, and which tags are open where it ends."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def shown(result: Any) -> list[str]:
    """In the cells of its table."""
    cells = Cells(result._repr_html_())
    assert not cells.open and cells.texts
    return cells.texts


def words(text: str) -> set[str]:
    return set(re.findall(r"[\w.]+\d", text))


def sharded() -> nn.Module:
    return zero3.shard(nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4)), layers=nn.Linear)


def test_a_table_of_a_notebook_shows_texts_as_they_are() -> None:
    cells = Cells(table("a <b> & c", [("x < y", "1")], ("name", "value"), ["none & nothing"]))
    assert cells.texts == ["a <b> & c", "name", "value", "x < y", "1", "none & nothing"] and not cells.open


def test_a_report_in_a_notebook_has_the_numbers_of_its_line() -> None:
    report = zero3.report(sharded())
    texts = shown(report)
    assert words(str(report)) - words("0.0 M") <= words(" ".join(texts)) | {"zero3"}
    assert "chunks, trainable float32" in texts and repr(zero3.ShardingPolicy()) in texts


def test_a_profile_in_a_notebook_has_a_row_for_each_layer() -> None:
    model = sharded()
    with zero3.profile(model) as found:
        model(torch.arange(7)).sum().backward()
    texts = shown(found)
    assert all(layer.label in texts for layer in found.layers)
    assert words(str(found)) == words(" ".join(texts)) - {"zero3"}


@pytest.mark.parametrize("number", [0, 1, 12])
def test_a_check_in_a_notebook_has_a_row_for_each_difference(number: int) -> None:
    report = CheckReport([Difference(f"layer.{n}", "gradient", n + 0.5, 7.0) for n in range(number)], 20, 0.25)
    texts = shown(report)
    assert [text for text in texts if text.startswith("layer.")] == [f"layer.{n}" for n in range(min(number, 10))]
    assert ("  and 2 more" in texts) is (number == 12)
    assert words(str(report)) == words(" ".join(texts))
