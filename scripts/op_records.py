"""Write docs/op-records.md: what each int64 of an op of the CPU kernels holds.

    python scripts/op_records.py [FILE]

`make options` runs this; tests/pure/test_op_records.py fails when the file is not up to date.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_type_hints

from ramify.kernels.cpu import op_records

PAGE = Path(__file__).resolve().parents[1] / "docs" / "op-records.md"
INTRO = f"""\
# Records of the fused ops

<!-- Written by scripts/op_records.py (make options). Edit src/ramify/kernels/cpu/op_records.py instead. -->

A step of a model on CPU is a list of ops, int64 [n, {op_records.OP_FIELDS}], that `kernels/cpu/op_list.py` and
`kernels/cpu/fused_layers.py` run in one call. Each op is one of these records, then zeros. Callers in
`models/ops/cpu` make them by name; a kernel reads field `x` of a norm as `op[NORM.x]`. Strides are in
bytes. `items`, `routing` and the number of items are those of `kernels/cpu/moe.py`, epilogues and storage
kinds those of `kernels/cpu/abi.py`.
"""


def page() -> str:
    """The page as Markdown."""
    return INTRO + "".join(map(_section, op_records.RECORDS))


def _section(record: type[tuple[int, ...]]) -> str:
    hints = get_type_hints(record, include_extras=True)
    rows = (
        f"| {number} | `{name}` | {hint.__metadata__[0]} |\n"
        for number, (name, hint) in enumerate(hints.items())
    )
    table = "".join(("| int64 | field | holds |\n|---|---|---|\n", *rows))
    return f"\n## {record.__name__}\n\n{record.__doc__}\n\n{table}"


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    target.write_text(page(), encoding="utf-8")
