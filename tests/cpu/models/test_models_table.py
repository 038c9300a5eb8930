"""docs/models.md is what code and tests say."""

import runpy
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the cases need the extra ramify[hf]")

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "models_table.py"


def test_the_page_is_up_to_date() -> None:
    """`make options` changes nothing, and every native family has a case."""
    table = runpy.run_path(str(SCRIPT))

    assert table["PAGE"].read_text(encoding="utf-8") == table["page"](), "run `make options`"
