"""Numbers of things in messages."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 page`, `2,345 pages`.

    Args:
        plural: of a noun that does not just take an s.
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
