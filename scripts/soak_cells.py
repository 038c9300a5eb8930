"""What both soak tests share: the options of the command line, and the summary at the end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from typing import NoReturn


def parse_arguments(
    doc: str, known_cells: Collection[str], unit: str, default: int
) -> argparse.Namespace:
    """Parse --UNIT, --cells, --seed and --jobs; returns `cells`, `per_cell`, `seed`, `jobs`.

    Args:
        doc: the script's docstring; its first line becomes the description.
        known_cells: names that --cells accepts; by default all.
        unit: of the amount of work, such as "requests".
        default: amount over all cells.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        f"--{unit}", dest="amount", type=int, default=default, help="over all cells"
    )
    parser.add_argument(
        "--cells", default=",".join(known_cells), help="comma-separated, of %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the next add 1")
    parser.add_argument("--jobs", type=int, help="processes (default: one per core)")
    args = parser.parse_args()
    args.cells = args.cells.split(",")
    if unknown := set(args.cells) - set(known_cells):
        parser.error(f"no such cells: {sorted(unknown)}; there are {list(known_cells)}")
    if args.amount < 1:
        parser.error(f"--{unit} {args.amount}, but at least 1 is needed")
    args.per_cell = -(-args.amount // len(args.cells))
    return args


def end(total: int, unit: str, failed_cells: Sequence[str], num_cells: int) -> NoReturn:
    """Print the summary and exit, with 1 if a cell failed."""
    summary = f"{total:,} {unit}, {len(failed_cells)} of {num_cells} cells failed"
    print(f"{summary} {failed_cells or ''}".rstrip())
    sys.exit(bool(failed_cells))
