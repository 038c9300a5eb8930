"""docs/models.md is what code and tests say."""

import runpy
from pathlib import Path

import pytest

from ramify.models.configs.families import FAMILIES

pytest.importorskip("transformers", reason="the cases need the extra ramify[hf]")

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "models_table.py"


def test_the_page_is_up_to_date() -> None:
    """`make options` changes nothing, and every native family has a case."""
    table = runpy.run_path(str(SCRIPT))

    assert table["PAGE"].read_text(encoding="utf-8") == table["page"](), "run `make options`"


def test_the_readme_counts_the_architectures() -> None:
    """The number in the README is that of the native families."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")

    assert f" {len(FAMILIES)} architectures of its own" in readme
