"""The page about building blocks is correct: its code runs and prints what the page shows."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

from ramify.attention import RadixAttentionWithPagedKVCache
from tests.pure.test_docs import blocks

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "building-blocks.md").read_text(encoding="utf-8")


def test_every_block_of_code_runs() -> None:
    """All code blocks run in order in one namespace, and leave no lease and no private page."""
    names: dict[str, Any] = {}
    printed = io.StringIO()

    with contextlib.redirect_stdout(printed):
        for number, code in enumerate(blocks(PAGE, "python")):
            exec(compile(code, f"building-blocks, block {number}", "exec"), names)

    assert printed.getvalue() == blocks(PAGE, "text")[0]
    names["cache"].check()
    assert names["cache"].stats().num_leases == names["cache"].stats().private_pages == 0


def test_the_table_has_every_call_of_the_paged_cache() -> None:
    """The table lists exactly the public names of the paged cache."""
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`(\w+)", row)}

    assert documented == {name for name in vars(RadixAttentionWithPagedKVCache) if name[0] != "_"}


def test_links_lead_somewhere() -> None:
    """Every link of the page names an existing file."""
    targets = re.findall(r"\]\(([^)\s]+)\)", PAGE)

    assert len(targets) > 3
    assert [target for target in targets if not (DOCS / target).exists()] == []
