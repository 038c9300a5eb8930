"""The text of an answer as it arrives, and what parsers do with it: peek, match, consume."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator
from typing import TypeVar

Result = TypeVar("Result")
# A parser is a generator that suspends while it needs more text than there is.
Steps = Generator[None, None, Result]

MAX_HELD_CHARS = 1 << 20  # of a call whose name is not known yet; a longer text is no call
MAX_WORD_CHARS = 1024  # of a name, a key, an id or a header
MAX_MARK_CHARS = 64
MAX_CHUNK_CHARS = 4096
BLANK = re.compile(r"\s*")


class MismatchError(Exception):
    """The text at the reader's position is not what the syntax asks for."""


class EndOfAnswerError(Exception):
    """The answer ends before the syntax does."""


class Marks:
    """Finds the first of several delimiters, none of which is a prefix of another."""

    def __init__(self, marks: Collection[str]) -> None:
        self._pattern = re.compile("|".join(map(re.escape, sorted(marks)))) if marks else None
        self._beginnings = frozenset(mark[:end] for mark in marks for end in range(1, len(mark)))
        self._max_partial = max((len(mark) - 1 for mark in marks), default=0)

    def find(self, text: str, start: int, *, is_last: bool = False) -> tuple[int, str]:
        """Position and text of the first mark at or after `start`.

        If no mark is certain to be the first, the text is "", and the position is where one may begin at
        the end of `text`: never, if no more text follows (`is_last`).
        """
        if self._pattern is None:
            return len(text), ""
        match = self._pattern.search(text, start)
        end = len(text) if match is None else match.start()
        for position in range(max(start, len(text) - self._max_partial), 0 if is_last else end):
            if text[position:] in self._beginnings:
                return position, ""
        return (end, "") if match is None else (end, match.group())


class Reader:
    """Text that has arrived and is not consumed, and consumed text that is not yet interpreted.

    While it holds, consumed text is kept: it is text of the answer if what looked like a call is none.
    Where a syntax fails does not depend on how the answer was cut into pieces.
    """

    def __init__(self) -> None:
        self._buffer, self._position, self._is_last = "", 0, False
        self._held: list[str] = []
        self._num_held, self._holds = 0, False
        self.num_taken = 0  # characters consumed so far

    def append(self, text: str, *, is_last: bool) -> None:
        """Append text of the answer."""
        self._buffer = self._buffer[self._position :] + text
        self._position, self._is_last = 0, is_last

    def prepend(self, text: str) -> None:
        """Put text before what is not consumed."""
        self._buffer, self._position = text + self._buffer[self._position :], 0

    # -- held text ---------------------------------------------------------------------------

    def hold(self) -> None:
        """Keep what is consumed from now on, and what is held already."""
        self._holds = True

    def drop(self) -> None:
        """Forget what is held, and keep what is consumed from now on."""
        self._held, self._num_held, self._holds = [], 0, True

    def release(self) -> str:
        """Stop holding; returns what is held."""
        held = "".join(self._held)
        self._held, self._num_held, self._holds = [], 0, False
        return held

    def take_all_held(self) -> str:
        """Consume what is left of the answer; returns all that is held."""
        self.rest()
        self._held = ["".join(self._held)]
        return self._held[0]

    def rest(self) -> str:
        """Consume and return what is left of the answer."""
        return self.take(len(self._buffer) - self._position)

    # -- consume -----------------------------------------------------------------------------

    def take(self, num_chars: int) -> str:
        """Consume characters that have arrived; none if the number is negative."""
        text = self._buffer[self._position : self._position + max(0, num_chars)]
        self._position += len(text)
        self.num_taken += len(text)
        if self._holds:
            self._held.append(text)
            self._num_held += len(text)
        return text

    def more(self) -> Steps[None]:
        """Wait for more text.

        Raises:
            EndOfAnswerError: there is none.
        """
        if self._is_last:
            raise EndOfAnswerError
        yield

    def chunk(self) -> Steps[str]:
        """Text that has arrived, from one character to `MAX_CHUNK_CHARS`, not consumed.

        Raises:
            MismatchError: more than `MAX_HELD_CHARS` are held.
        """
        while self._position == len(self._buffer):
            yield from self.more()
        num_chars = MAX_CHUNK_CHARS
        if self._holds:
            num_chars = min(num_chars, MAX_HELD_CHARS - self._num_held)
            if not num_chars:
                raise MismatchError
        return self._buffer[self._position : self._position + num_chars]

    def char(self) -> Steps[str]:
        """The next character, not consumed."""
        while self._position == len(self._buffer):
            yield from self.more()
        return self._buffer[self._position]

    def skip_blank(self, write: Callable[[str], None] | None = None) -> Steps[None]:
        """Consume white space up to the next other character, and `write` it."""
        while True:
            match = BLANK.match(self._buffer, self._position)
            assert match is not None, "an empty text matches"
            blank = self.take(match.end() - match.start())
            if write is not None:
                write(blank)
            if self._position < len(self._buffer):
                return
            yield from self.more()

    def next_is(self, *literals: str) -> Steps[str]:
        """The first of the literals that follows, not consumed; "" if none does.

        Raises:
            EndOfAnswerError: the answer ends within what may become one of them.
        """
        while True:
            length = len(self._buffer) - self._position
            for literal in literals:
                if self._buffer.startswith(literal, self._position):
                    return literal
                if length < len(literal) and literal.startswith(self._buffer[self._position :]):
                    break
            else:
                return ""
            yield from self.more()

    def accept(self, *literals: str) -> Steps[str]:
        """Consume the literal that follows; "" if none of them does."""
        literal = yield from self.next_is(*literals)
        return self.take(len(literal))

    def expect(self, *literals: str) -> Steps[str]:
        """Consume the literal that follows.

        Raises:
            MismatchError: none of them does; nothing is consumed.
        """
        literal = yield from self.accept(*literals)
        if not literal:
            raise MismatchError
        return literal

    def word(self, marks: Marks, max_chars: int = MAX_WORD_CHARS) -> Steps[str]:
        """Consume the text before the first mark.

        Raises:
            MismatchError: it is longer; nothing is consumed.
        """
        while True:
            window = self._buffer[self._position : self._position + max_chars + MAX_MARK_CHARS]
            end, mark = marks.find(window, 0)
            if end > max_chars:
                raise MismatchError
            if mark:
                return self.take(end)
            yield from self.more()

    def match(self, pattern: re.Pattern[str], partial: re.Pattern[str]) -> Steps[re.Match[str]]:
        """Consume what matches `pattern`. Its repetitions, and those of `partial`, are possessive.

        Args:
            partial: matches each text that more text can make match `pattern`.

        Raises:
            MismatchError: nothing matches in the next `MAX_WORD_CHARS`; nothing is consumed.
        """
        while True:
            end = self._position + MAX_WORD_CHARS
            match = pattern.match(self._buffer, self._position, end)
            if match is not None:
                self.take(match.end() - match.start())
                return match
            is_partial = partial.fullmatch(self._buffer, self._position, end)
            if len(self._buffer) >= end or not is_partial:
                raise MismatchError
            yield from self.more()

    def copy_until(self, marks: Marks, write: Callable[[str], None]) -> Steps[str]:
        """Write the text before the first mark as it arrives; returns the mark, not consumed.

        Raises:
            EndOfAnswerError: there is no mark, and all text is written.
        """
        while True:
            end, mark = marks.find(self._buffer, self._position, is_last=self._is_last)
            if end > self._position:
                write(self.take(end - self._position))
            if mark:
                return mark
            yield from self.more()
