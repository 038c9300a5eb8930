"""Texts of high entropy, as ids are."""

from __future__ import annotations

import re
from collections.abc import Sequence

MIN_RANDOM_DIGITS = 9  # behind the point of a random number; a time has fewer
_DECIMAL = re.compile(r"\D?\d+\.(\d+)")
_MIXED = re.compile(r"\b(?=\w{4})\d+[A-Za-z]+\d")
_HEX = re.compile(r"(?:[0-9a-f]{2,}-)*[0-9a-f]{6,}", re.IGNORECASE)


def is_random(value: str) -> bool:
    """Whether a text is a word or two with the entropy of an id, or a number of four digits or more."""
    if len(value) > 120 or len(value.split()) > 2:
        return False
    has_digit = any(map(str.isdigit, value))
    has_letter = any(any(map(str.isalpha, w)) and any(map(str.isdigit, w)) for w in value.split())
    bare = value.strip(".,:;")
    if decimal := _DECIMAL.fullmatch(bare):
        return len(decimal[1]) >= MIN_RANDOM_DIGITS
    if has_digit and (_HEX.search(bare) or _MIXED.search(bare) or (has_letter and len(bare) >= 5)):
        return True
    return bare.isdigit() and len(bare) >= 4


def are_random(values: Sequence[str]) -> bool:
    """Whether all values are random; of 24 letters and digits, 1 in 75 has no digit."""
    lengths = {len(value) for value in values if is_random(value)}
    return all(
        is_random(value) or (len(value) in lengths and len(value.split()) == 1 and len(value) >= 8)
        for value in values
    )
