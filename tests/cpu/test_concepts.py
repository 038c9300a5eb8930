"""The pages of docs/concepts are true: their code runs and prints what they show."""

from pathlib import Path

import pytest

from tests.page_code import run_python

PAGES = sorted((Path(__file__).resolve().parents[2] / "docs" / "concepts").glob("*.md"))
MAX_WORDS = 600  # two screens


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_code_runs(page: Path) -> None:
    """Python blocks print what the page shows."""
    text = page.read_text(encoding="utf-8")

    names = run_python(text, page.stem)

    if "llm" in names:
        names["llm"].close()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_concept_is_read_in_two_minutes(page: Path) -> None:
    """At most two screens, one idea, and the pages that say more."""
    text = page.read_text(encoding="utf-8")

    assert len(text.split()) <= MAX_WORDS
    assert "\nRead on: " in text
