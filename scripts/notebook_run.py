"""Run the cells of a notebook in a plain Python, and keep what they print and draw.

    python scripts/notebook_run.py NOTEBOOK...

writes the outputs into the notebooks. tests/cpu/test_notebooks.py runs the same and compares. Neither needs
Jupyter: a cell is a block of Python whose last line, if it is an expression, is shown.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

Cell = dict[str, Any]


def run_notebook(notebook: dict[str, Any]) -> dict[str, Any]:
    """A notebook of nbformat 4 with the outputs that its code cells have here, in one namespace."""
    names: dict[str, Any] = {}
    cells: list[Cell] = []
    num_run = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            num_run += 1
            outputs = run_cell("".join(cell["source"]), names, num_run)
            cells.append(cell | {"execution_count": num_run, "outputs": outputs})
        else:
            cells.append(cell)
    close = getattr(names.get("llm"), "close", None)
    if close is not None:
        close()
    return notebook | {"cells": cells}


def run_cell(source: str, names: dict[str, Any], number: int) -> list[Cell]:
    """Outputs of a cell: what it prints, then its last line, if that is an expression with a value."""
    body = ast.parse(source, f"cell {number}").body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    printed = io.StringIO()
    value = None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), f"cell {number}", "exec"), names)  # noqa: S102
        if isinstance(last, ast.Expr):
            code = compile(ast.Expression(last.value), f"cell {number}", "eval")
            value = eval(code, names)  # noqa: S307
    outputs: list[Cell] = []
    if printed.getvalue():
        lines = printed.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
    if value is not None:
        outputs.append(shown(value, number))
    return outputs


def shown(value: object, number: int) -> Cell:
    """The output of a value, with its drawing if it has one."""
    data: dict[str, list[str]] = {"text/plain": [repr(value)]}
    draw = getattr(value, "_repr_svg_", None)
    if draw is not None:
        data = {"image/svg+xml": draw().splitlines(keepends=True)} | data
    return {
        "data": data,
        "execution_count": number,
        "metadata": {},
        "output_type": "execute_result",
    }


def main() -> None:
    """Run the notebooks and write them."""
    for name in sys.argv[1:]:
        file = Path(name)
        notebook = run_notebook(json.loads(file.read_text(encoding="utf-8")))
        text = json.dumps(notebook, indent=1, ensure_ascii=False)
        file.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
