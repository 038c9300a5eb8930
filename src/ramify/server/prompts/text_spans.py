"""Where texts stand in a longer text that has them one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

# Limits of the search: characters in all, whole texts.
MAX_SEARCHED, MAX_SEARCHES = 200_000_000, 64
MAX_AHEAD = 8  # texts without a variant between a text and the next


@dataclass(frozen=True, slots=True)
class SoughtText:
    """A text to find.

    Args:
        variants: the forms that it may have, the likeliest first.
        may_be_missing: an occurrence behind the next text is another text's.
    """

    variants: tuple[str, ...]
    may_be_missing: bool = False


@dataclass(slots=True)
class _Search:
    """Finds texts behind a cursor that only moves forward, and remembers where."""

    text: str
    num_left: int  # characters that may still be searched
    starts: dict[str, int] = field(default_factory=dict)  # of the last search for a text; -1: none

    def start(self, variant: str, cursor: int) -> int:
        """Index of a text at or behind the cursor; -1 if there is none, or no budget left."""
        start = self.starts.get(variant)
        if start is not None and (start < 0 or start >= cursor):
            return start
        if not variant or self.num_left <= 0:
            return -1
        start = self.text.find(variant, cursor)
        self.num_left -= (start if start >= 0 else len(self.text)) - cursor
        self.starts[variant] = start
        return start

    def span(self, sought: SoughtText, following: SoughtText, cursor: int) -> tuple[int, int]:
        """The span of the likeliest variant; empty, at the cursor, if there is none."""
        for variant in sought.variants:
            start = self.start(variant, cursor)
            if start < 0:
                continue
            others = following.variants if sought.may_be_missing else ()
            if not any(0 <= self.start(other, cursor) < start for other in others):
                return start, start + len(variant)
        return cursor, cursor


def find_spans(text: str, sought: Sequence[SoughtText]) -> Iterator[tuple[int, int]]:
    """Yield the span of each text, in order; it is empty where the text is missing.

    Also if missing texts took more than `MAX_SEARCHED` characters and `MAX_SEARCHES` texts.
    """
    search = _Search(text, max(MAX_SEARCHED, MAX_SEARCHES * len(text)))
    cursor = 0
    for index, item in enumerate(sought):
        behind = islice(sought, index + 1, index + 1 + MAX_AHEAD)
        following = next((other for other in behind if any(other.variants)), SoughtText(()))
        start, cursor = search.span(item, following, cursor)
        yield start, cursor
