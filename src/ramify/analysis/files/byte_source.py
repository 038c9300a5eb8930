"""Bytes of a log with a position, a line number, and lines and JSON values taken from it."""

from __future__ import annotations

import re
from typing import Protocol

from ramify.analysis.files.log_paths import TruncatedFileError

CHUNK_BYTES = 1 << 20
MAX_VALUE_BYTES = 1 << 27  # of a line or value: no API takes a request of this size
TOO_LONG = f"longer than {MAX_VALUE_BYTES >> 20} MiB"

# A string with its escapes, to its end, to the end of the line (which no string may hold) or to the
# end of the data; or a bracket. Possessive: nothing is tried twice, and nothing stored per escape.
STRING = rb'"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+'
TOKEN = re.compile(STRING + rb'(?:["\n]|\\?\Z)|[\[\]{}]', re.DOTALL)
# Everything up to the next bracket that is not in a string, and the bracket.
_STEP = re.compile(rb'(?:[^"\[\]{}]++|' + STRING + rb'")*+[\[\]{}]', re.DOTALL)
_OPEN_STRING = re.compile(rb'(?:[^"\[\]{}]++|' + STRING + rb'")*+' + STRING + rb"\n", re.DOTALL)
_BLANK = re.compile(rb"[ \t\r\n]*")


class Readable(Protocol):
    """What bytes are read from."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; none at the end."""
        ...


class ValueTooLongError(Exception):
    """A line or value is longer than the limit."""


class ByteSource:
    """Takes lines and JSON values from a stream, with the number of the line at the position."""

    def __init__(self, stream: Readable, *, max_value_bytes: int = MAX_VALUE_BYTES) -> None:
        self._stream = stream
        self._max_value_bytes = max_value_bytes
        self.buffer = b""
        self.position = 0
        self.line = 1
        self.indent = b""  # blanks before the value that `skip_blank` went to
        self.is_truncated = False
        self._is_at_end = False

    def fill(self) -> bool:
        """Append a chunk to what is left of the buffer; False at the end.

        What is left begins at position 0 afterwards. A chunk is as long as what is left, so that
        looking for the end of a long value stays linear.
        """
        if self._is_at_end:
            return False
        rest = self.buffer[self.position :]
        try:
            chunk = self._stream.read(max(CHUNK_BYTES, len(rest)))
        except TruncatedFileError:
            self.is_truncated = True
            chunk = b""
        if not chunk:
            self._is_at_end = True
            return False
        self.buffer, self.position = rest + chunk, 0
        return True

    def head(self, size: int) -> bytes:
        """At least `size` bytes from the position on, fewer at the end; nothing is taken."""
        while len(self.buffer) - self.position < size and self.fill():
            pass
        return self.buffer[self.position : self.position + size]

    def skip_blank(self) -> bytes:
        """Go to the next byte that is no blank; returns it, b"" at the end."""
        while True:
            match = _BLANK.match(self.buffer, self.position)
            end = self.position if match is None else match.end()
            blank = self.buffer[self.position : end]
            _, newline, indent = blank.rpartition(b"\n")
            self.indent = indent if newline else self.indent + indent
            self.advance(end)
            if end < len(self.buffer):
                return self.buffer[end : end + 1]
            if not self.fill():
                return b""

    def advance(self, end: int) -> None:
        """Go to an offset of the buffer and count the lines before it."""
        self.line += self.buffer.count(b"\n", self.position, end)
        self.position = end

    def take_line(self) -> bytes | None:
        """The rest of the line without its end; None at the end of the data.

        Raises:
            ValueTooLongError: the line is over the limit; it is skipped.
        """
        searched = 0
        while True:
            end = self.buffer.find(b"\n", self.position + searched)
            if end >= 0:
                line = self.buffer[self.position : end]
                self.position = end + 1
                self.line += 1
                return line.removesuffix(b"\r")
            searched = len(self.buffer) - self.position
            if searched > self._max_value_bytes:
                self.skip_line()
                raise ValueTooLongError
            if not self.fill():
                if not searched:
                    return None
                line = self.buffer[self.position :]
                self.position = len(self.buffer)
                return line.removesuffix(b"\r")

    def skip_line(self) -> None:
        """Go behind the end of the line."""
        while True:
            end = self.buffer.find(b"\n", self.position)
            if end >= 0:
                self.position = end + 1
                self.line += 1
                return
            self.position = len(self.buffer)
            if not self.fill():
                return

    def value_end(self) -> int | None:
        """Offset behind the object or list at the position.

        None if it does not end, or if a string goes over the end of a line.

        Raises:
            ValueTooLongError: the value is over the limit.
        """
        depth, offset = 0, 0
        while True:
            step, buffer, place = _STEP.match, self.buffer, self.position + offset
            while (match := step(buffer, place)) is not None:
                place = match.end()
                depth += 1 if buffer[place - 1] in b"[{" else -1
                if depth <= 0:
                    return place
            offset = place - self.position
            if _goes_over_line_end(buffer, place):
                return None
            # A string that does not end moves no offset.
            if len(buffer) - self.position > self._max_value_bytes:
                raise ValueTooLongError
            if not self.fill():
                return None

    def resync(self, indent: bytes, end: int | None) -> None:
        """Go to the next line that begins with these blanks and a brace.

        Args:
            indent: blanks.
            end: offset of the buffer that is gone to at the latest; None is the end of the data.
        """
        start_of_value = re.compile(rb"\n" + re.escape(indent) + rb"\{")
        start = self.position + 1
        while True:
            limit = len(self.buffer) if end is None else end
            match = start_of_value.search(self.buffer, start, limit)
            if match is not None:
                self.advance(match.end() - 1)
                return
            self.advance(max(self.position, limit - (len(indent) + 2 if end is None else 0)))
            if end is not None or not self.fill():
                self.advance(limit if end is not None else len(self.buffer))
                return
            start = self.position

    def enter_list(self, names: frozenset[str]) -> bool:
        """Go behind the bracket of a list that the object at the position holds under a name.

        The list is at the first level, or at the second in `log`. Looks at the first
        `CHUNK_BYTES` only; without such a list the position stays.
        """
        head = self.head(CHUNK_BYTES)
        keys: list[str] = []
        depth, last = 0, b""
        for match in TOKEN.finditer(head):
            token = match[0]
            if token[0] == 0x22:
                last = token
            elif token in b"[{":
                name = last[1:-1].decode("utf-8", "replace")
                is_level = depth == 1 or (depth == 2 and keys[1:] == ["log"])
                if token == b"[" and is_level and name in names and _has_objects(head, match.end()):
                    self.advance(self.position + match.end())
                    return True
                keys.append(name)
                depth += 1
            else:
                depth -= 1
                if depth <= 0:
                    return False
                keys.pop()
        return False


def balance(data: bytes) -> int | None:
    """Brackets that are open at the end; None if the data ends inside a string."""
    depth = 0
    for match in TOKEN.finditer(data):
        token = match[0]
        if token[0] == 0x22:
            if match.end() == len(data) and not _is_closed(token):
                return None
        else:
            depth += 1 if token in b"[{" else -1
    return depth


def _goes_over_line_end(data: bytes, start: int) -> bool:
    """Whether the next string that does not end in the data has a line end."""
    return _OPEN_STRING.match(data, start) is not None


def _is_closed(token: bytes) -> bool:
    if len(token) < 2 or token[-1] != 0x22:
        return False
    backslashes = len(token) - 1 - len(token[:-1].rstrip(b"\\"))
    return backslashes % 2 == 0


def _has_objects(data: bytes, start: int) -> bool:
    match = _BLANK.match(data, start)
    return match is not None and data[match.end() : match.end() + 1] in {b"{", b"]"}
