"""The quick start's lines in a notebook, which nbconvert runs: `make notebook`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.docs.test_pages import blocks_of

pytest.importorskip("nbconvert", reason="nbconvert is not installed: make notebook")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

PAGE = (Path(__file__).parents[2] / "docs" / "quickstart.md").read_text()
SHOWN = {"plan": "a micro-batch is 1 x 16 tokens", "checked": "agree", "report": "trainable float32", "profile": "zero3 profile"}


@pytest.mark.slow
def test_a_notebook_shows_plan_check_report_and_profile_as_tables(tmp_path: Path) -> None:
    from nbconvert.exporters import HTMLExporter
    from nbconvert.preprocessors import ExecutePreprocessor

    (code,) = [block for block in blocks_of(PAGE, "python") if "zero3.profile" in block]
    cells = [nbformat.v4.new_code_cell(source) for source in (code, *SHOWN)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    ExecutePreprocessor(timeout=200, kernel_name="python3").preprocess(notebook, {"metadata": {"path": str(tmp_path)}})
    for cell, (name, text) in zip(notebook.cells[1:], SHOWN.items(), strict=True):
        (output,) = cell.outputs
        assert output.data["text/html"].startswith("<table>") and text in output.data["text/html"], (name, json.dumps(output.data))
    page, _ = HTMLExporter().from_notebook_node(notebook)
    assert page.count("<caption>") == len(SHOWN)
