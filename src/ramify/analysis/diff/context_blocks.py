"""Blocks of context in user messages, which clients put into the newest message anew."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"\d+")
MIN_BLOCK = 24  # code points of a block of context that moves


def split_block(had: str, got: str, newest: str) -> tuple[str, str]:
    """The lines at the start or end of a text that are gone and stand in the newest message, and the rest.

    A line may have other numbers there: a clock in the block.
    """
    lines, kept = had.split("\n"), set(got.split("\n"))
    new = {_mask(line) for line in newest.split("\n")}

    def is_gone(line: str) -> bool:
        return line not in kept and _mask(line) in new

    start, end = 0, len(lines)
    while start < end and is_gone(lines[start]):
        start += 1
    if not start:
        while end > start and is_gone(lines[end - 1]):
            end -= 1
    block = lines[:start] or lines[end:]
    return "\n".join(block), "\n".join(lines[start:end])


def mostly_in(block: str, text: str) -> bool:
    """Whether most lines of a block stand in a text, or begin as lines of it do, whatever their numbers."""
    if block in text:
        return True
    block, text = _mask(block), _mask(text)
    lines = [line.strip() for line in block.splitlines() if line.strip()]
    inside = sum(len(line) for line in lines if line in text)
    return inside * 2 >= sum(map(len, lines))


def _mask(line: str) -> str:
    return _NUMBER.sub("0", line)
