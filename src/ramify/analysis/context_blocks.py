"""Blocks of context in user messages, which clients put into the newest message anew."""

from __future__ import annotations

MIN_BLOCK = 24  # code points of a block of context that moves


def split_block(had: str, got: str, newest: str) -> tuple[str, str]:
    """The lines at the start or end of a text that are gone and stand in the newest message, and the rest."""
    lines, kept, new = had.split("\n"), set(got.split("\n")), set(newest.split("\n"))
    start, end = 0, len(lines)
    while start < end and lines[start] not in kept and lines[start] in new:
        start += 1
    if not start:
        while end > start and lines[end - 1] not in kept and lines[end - 1] in new:
            end -= 1
    block = lines[:start] or lines[end:]
    return "\n".join(block), "\n".join(lines[start:end])


def mostly_in(block: str, text: str) -> bool:
    """Whether most lines of a block stand in a text, or begin as lines of it do."""
    if block in text:
        return True
    lines = [line.strip() for line in block.splitlines() if line.strip()]
    inside = sum(len(line) for line in lines if line in text)
    return inside * 2 >= sum(map(len, lines))
