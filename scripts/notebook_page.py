"""A notebook as a page of Markdown: texts, code, and what the code printed and drew."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def notebook_markdown(notebook: str) -> str:
    """Markdown of a notebook of nbformat 4, with the outputs that are stored in it.

    Args:
        notebook: its JSON.

    Text and SVG outputs are kept; of other types an output has its text.
    """
    cells = json.loads(notebook)["cells"]
    return "\n\n".join(part for cell in cells for part in cell_parts(cell)) + "\n"


def cell_parts(cell: dict[str, Any]) -> Iterator[str]:
    """The blocks of Markdown that a cell is made of."""
    source = joined(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        svg = joined(data.get("image/svg+xml", ""))
        text = joined(output.get("text", data.get("text/plain", "")))
        if svg:
            yield f"<figure>\n{svg.strip()}\n</figure>"
        elif text:
            yield f"```text\n{text.rstrip()}\n```"


def joined(text: str | list[str]) -> str:
    """Text of a notebook, which may be stored in lines."""
    return text if isinstance(text, str) else "".join(text)
