"""Write docs/causes.md: every cause of lost cache hits, what happens and what to change.

    python scripts/causes_table.py [FILE]

`make options` runs this; tests/pure/analysis/test_causes_page.py fails when the file is not up to date.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ramify.analysis.findings import CHANGES
from ramify.analysis.report.wording.causes import CAUSES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "causes.md"
INTRO = """\
# Causes of lost cache hits

<!-- Written by scripts/causes_table.py (make options). Edit src/ramify/analysis instead. -->

The values of `cause` in the JSON of [`ramify lint`](analysis.md#json-of-lint), in budgets and in reports.
`new_content`, `compaction` and `outside_prompt` are no waste in the prompt.

| `cause` | what happens | what to change |
|---|---|---|
"""


def page() -> str:
    """The page as Markdown."""
    rows = (
        f"| `{cause}` | {text.what} | {CHANGES.get(cause, '')} |" for cause, text in CAUSES.items()
    )
    return INTRO + "\n".join(rows) + "\n"


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    target.write_text(page(), encoding="utf-8")
