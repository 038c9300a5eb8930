"""Blocks of context in messages: those that move to the newest message, and the order of the others."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from functools import cached_property

from ramify.analysis.corpus import Corpus
from ramify.analysis.records import SegmentKind, TextForm

_NUMBER = re.compile(r"\d+")
# An empty line, or the end of a line beside a tag.
_BETWEEN_BLOCKS = re.compile(r"\n[ \t]*+\n\s*+|\n(?=<)|(?<=>)\n")
_WRITTEN = frozenset({"", "user", "system", "developer"})  # roles whose text the client composes
MIN_BLOCK = 24  # code points of a block of context that moves
MIN_SHARED_BLOCK = 64  # code points of a block by which texts are ordered


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


class BlockOrder:
    """Blocks of messages in the order that shares most: those of most messages first.

    A block is a paragraph of a text, or a part of a message's content. Blocks that no other message has
    come last, as they stand. Memory: about 200 bytes a block.
    """

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._num_messages: Counter[int] = (
            Counter()
        )  # by key of a block, the first that was sent first
        self._learned: set[Hashable] = set()
        self._mended: dict[int, int] = {}

    def learn(self, units: Sequence[int]) -> None:
        """Count the blocks of a message, once."""
        texts = [unit for unit in units if self._is_composed(unit)]
        key: Hashable = texts[0] if len(texts) == 1 else tuple(texts)
        if not texts or key in self._learned:
            return
        self._learned.add(key)
        if len(texts) > 1:
            long = (
                unit for unit in texts if self._corpus.units[unit].num_chars >= MIN_SHARED_BLOCK
            )
            self._num_messages.update(dict.fromkeys(map(_key_of_part, long), 1))
        for unit in texts:
            if len(texts) == 1 or unit not in self._learned:
                self._learned.add(unit)
                blocks = _BETWEEN_BLOCKS.split(self._corpus.text(unit))
                # Not a set: the order in which blocks are first seen is that of the text.
                keys = dict.fromkeys(map(_key_of_text, blocks), 1)
                keys.pop(0, None)
                self._num_messages.update(keys)

    def mend(self, unit: int) -> int:
        """The unit with its blocks in the order that shares most."""
        known = self._mended.get(unit)
        if known is None:
            known = self._mended[unit] = self._reorder(unit) if self._is_composed(unit) else unit
        return known

    def sorted_parts(self, parts: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
        """Parts of a message, units with paths, in the order that shares most; answers stay as they are."""
        if not all(self._is_composed(unit) for unit, _ in parts):
            return list(parts)
        return sorted(parts, key=lambda part: self._rank(_key_of_part(part[0])))

    def _is_composed(self, unit: int) -> bool:
        """Whether the client chooses the order of a unit's blocks: a text of the user or the system."""
        stored = self._corpus.units[unit]
        is_text = stored.form is TextForm.TEXT and stored.kind is not SegmentKind.SETTING
        return is_text and stored.label.partition(" ")[0] in _WRITTEN

    def _rank(self, key: int) -> tuple[int, int]:
        """Sorts blocks of most messages first, and of equals the first that was sent."""
        count = self._num_messages.get(key, 0)
        return (-count, self._first[key]) if count > 1 else (0, 0)

    @cached_property
    def _first(self) -> dict[int, int]:
        return {key: number for number, key in enumerate(self._num_messages)}

    def _reorder(self, unit: int) -> int:
        blocks = _BETWEEN_BLOCKS.split(self._corpus.text(unit))
        ordered = sorted(blocks, key=lambda block: self._rank(_key_of_text(block)))
        return unit if ordered == blocks else self._corpus.unit_like(unit, "\n\n".join(ordered))


def message_of(part: tuple[int, str]) -> str:
    """Path of the message that a unit with its path is a part of."""
    return part[1].partition(".")[0]


def _key_of_text(block: str) -> int:
    """Equal for blocks with the same words; 0 for a block that is too short to matter."""
    words = " ".join(block.split())
    return hash(words) if len(words) >= MIN_SHARED_BLOCK else 0


def _key_of_part(unit: int) -> int:
    return -1 - unit
