"""`EventWriter`: makes events of what a parser reads; trims white space, draws call ids."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ramify.server.model_dialects.events import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
)
from ramify.server.model_dialects.reader import MismatchError, Reader

Content = type[TextDelta] | type[ReasoningDelta]


def new_call_id() -> str:
    """A random id of a call."""
    return f"call_{secrets.token_hex(12)}"


def new_short_call_id() -> str:
    """A random id of nine letters and digits, as Mistral's templates ask for."""
    return secrets.token_hex(5)[:9]


class EventWriter:
    """Collects the events of an answer.

    White space next to a delimiter of reasoning or of a call is dropped, on either side, and all other
    white space is kept. So text that stands between two calls has none at its ends, and an answer
    without delimiters is unchanged.

    Args:
        tools: name → JSON schema of the arguments, {} if it is not known.
        hidden: marks that are dropped from text and reasoning wherever they stand.
        new_id: makes the id of a call.
    """

    def __init__(
        self,
        reader: Reader,
        tools: Mapping[str, Mapping[str, Any]],
        *,
        hidden: Collection[str] = (),
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self.tools = tools
        # Of a name with what formats write around it, such as white space and an index.
        self.max_name_chars = max(map(len, tools), default=0) + 64
        self._reader, self._hidden, self._new_id = reader, hidden, new_id
        self._events: list[OutputEvent] = []
        self._content: Content = TextDelta
        self._blanks: list[str] = []  # after the last text; kept if more text follows
        self._is_after_delimiter = False
        self._num_calls, self._is_open = 0, False
        self.call_ids: set[str] = set()  # of the calls that have begun

    @property
    def is_open(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._is_open

    @property
    def num_calls(self) -> int:
        """Number of calls that have ended."""
        return self._num_calls

    def take(self) -> list[OutputEvent]:
        """Return the events since the last call, and forget them."""
        events, self._events = self._events, []
        return events

    # -- text and reasoning ------------------------------------------------------------------

    def text(self, text: str) -> None:
        """Append text of the answer."""
        self._write(TextDelta, text)

    def reasoning(self, text: str) -> None:
        """Append reasoning."""
        self._write(ReasoningDelta, text)

    def plain(self, text: str) -> None:
        """Append text that turned out to be no mark and no call, without hidden marks in it."""
        for mark in self._hidden:
            text = text.replace(mark, "")
        self._write(self._content, text)

    def delimiter(self) -> None:
        """A delimiter stands here: drop white space on both sides."""
        self._blanks, self._is_after_delimiter = [], True

    def finish(self) -> None:
        """The answer has ended: write the white space at its end."""
        if self._blanks:
            self._events.append(self._content("".join(self._blanks)))
            self._blanks = []

    def _write(self, content: Content, text: str) -> None:
        if content is not self._content:
            self.delimiter()
            self._content = content
        if self._is_after_delimiter:
            text = text.lstrip()
        if not text:
            return
        self._is_after_delimiter = False
        shown = text.rstrip()
        if shown:
            self._events.append(content("".join([*self._blanks, shown])))
            self._blanks = []
        if len(shown) < len(text):
            self._blanks.append(text[len(shown) :])

    # -- calls -------------------------------------------------------------------------------

    def check_name(self, name: str) -> str:
        """Return a name that is one of the request's tools.

        Raises:
            MismatchError: it is none.
        """
        if name not in self.tools:
            raise MismatchError
        return name

    def start_call(self, name: str, call_id: str = "") -> None:
        """A call of a known tool begins; the text held so far belongs to it."""
        self._reader.release()
        self.delimiter()
        self._is_open = True
        call_id = call_id or self._new_id()
        self.call_ids.add(call_id)
        self._events.append(CallStart(name, call_id))

    def whole_call(self, name: str, arguments: str, call_id: str = "") -> None:
        """Write a call whose arguments are known as a whole."""
        self.start_call(name, call_id)
        self.arguments(arguments)
        self.end_call()

    def arguments(self, text: str) -> None:
        """Append to the arguments of the open call."""
        if text:
            self._events.append(ArgumentsDelta(text))

    def end_call(self, *, is_complete: bool = True) -> None:
        """The open call ends; what follows is held until the format's end mark has been seen."""
        self._events.append(CallEnd(is_complete))
        self._num_calls += 1
        self._is_open = False
        self._reader.hold()
