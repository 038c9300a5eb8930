"""The Python blocks of a documentation page, run as a reader runs them."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Mapping
from typing import Any

BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)


def run_python(page: str, name: str, replaced: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run the Python blocks of a page in order, in a namespace that is returned.

    Args:
        page: its text.
        name: for tracebacks.
        replaced: text of the blocks, and what stands for it here: an address, a model.

    Raises:
        AssertionError: a block printed something else than the `text` block that follows it; only
            where nothing is replaced.
    """
    names: dict[str, Any] = {}
    for number, (code, shown) in enumerate(BLOCK.findall(page)):
        for text, other in (replaced or {}).items():
            code = code.replace(text, other)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, f"{name}, block {number}", "exec"), names)
        if shown and not replaced:
            assert printed.getvalue() == shown, f"{name}, block {number}"
    return names
