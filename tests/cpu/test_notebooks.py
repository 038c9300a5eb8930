"""The notebooks of the documentation run, without Jupyter, and print and draw what is stored in them."""

import json
from pathlib import Path

import pytest
from notebook_run import run_cell, run_notebook

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_has_the_outputs_of_its_cells(file: Path) -> None:
    """`python scripts/notebook_run.py NOTEBOOK` changes nothing."""
    notebook = json.loads(file.read_text(encoding="utf-8"))

    again = run_notebook(notebook)

    stored = [cell.get("outputs") for cell in notebook["cells"]]
    assert any(stored)
    assert [cell.get("outputs") for cell in again["cells"]] == stored
    assert again == notebook


def test_a_cell_shows_its_last_expression() -> None:
    """Behind what it prints; an assignment shows nothing, and names stay for the next cell."""
    names: dict[str, object] = {}

    assert run_cell("x = 3", names, 1) == []
    printed, value = run_cell("print('a')\nx + 1", names, 2)

    assert printed["text"] == ["a\n"]
    assert value["data"] == {"text/plain": ["4"]}


def test_a_drawing_is_kept() -> None:
    """As Jupyter does, with the text beside it."""
    source = "class Dot:\n    def _repr_svg_(self):\n        return '<svg/>'\nDot()"

    [output] = run_cell(source, {}, 1)

    assert output["data"]["image/svg+xml"] == ["<svg/>"]
