"""docs/causes.md is what the code says."""

import runpy
from pathlib import Path

from ramify.analysis.report.wording.causes import CAUSES
from ramify.analysis.verdicts import CauseName

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "causes_table.py"


def test_the_page_is_up_to_date() -> None:
    """`make options` would change nothing."""
    table = runpy.run_path(str(SCRIPT))

    assert table["PAGE"].read_text(encoding="utf-8") == table["page"]()


def test_every_cause_has_words() -> None:
    """No cause is missing in the table."""
    assert list(CAUSES) and set(CAUSES) == set(CauseName)
