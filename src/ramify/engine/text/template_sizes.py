"""Size of the values of a chat template, as trees: what writing, comparing or sorting them costs.

A list that holds another twice is small in memory and twice as large as a tree: forty of them, one in the
other, take for ever to write. Values that are shared count each time, and are visited once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from jinja2.utils import Namespace

NODES_PER_TICK = 64


class TreeSize(NamedTuple):
    """Elements of a value and of all values in it, and the characters of its texts."""

    num_nodes: int
    num_chars: int


def tree_size(value: Any, tick: Callable[[], None]) -> TreeSize:
    """The size of a value as a tree.

    Args:
        tick: called once for each `NODES_PER_TICK` values that are visited; may raise.
    """
    sizes: dict[int, TreeSize] = {}
    # A value is measured when it comes up again, behind those in it; those within themselves count as 0.
    stack, is_open = [value], set[int]()
    num_visited = 0
    while stack:
        item = stack[-1]
        key = id(item)
        if key in sizes:
            stack.pop()
            continue
        num_visited += 1
        if num_visited % NODES_PER_TICK == 0:
            tick()
        if isinstance(item, str):
            sizes[key] = TreeSize(1, len(item))
            continue
        parts = _parts(item)
        if key not in is_open and parts:
            is_open.add(key)
            stack += [part for part in parts if id(part) not in is_open or id(part) in sizes]
            continue
        inner = [sizes.get(id(part), TreeSize(0, 0)) for part in parts]
        sizes[key] = TreeSize(
            1 + sum(size.num_nodes for size in inner), sum(size.num_chars for size in inner)
        )
    return sizes[id(value)]


def _parts(value: Any) -> list[Any]:
    """The values in a value."""
    if isinstance(value, Namespace):
        value = object.__getattribute__(value, "_Namespace__attrs")
    if isinstance(value, Mapping):
        parts: Iterable[Any] = (part for item in value.items() for part in item)
        return list(parts)
    return list(value) if isinstance(value, list | tuple | set | frozenset) else []
