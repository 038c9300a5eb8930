"""The tree of a Claude Code transcript: lines by uuid, responses that several lines hold, histories."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ramify.analysis.readers.bodies.anthropic_bodies import anthropic_message
from ramify.analysis.records import Segment


@dataclass(frozen=True, slots=True)
class TranscriptLine:
    """A line that is part of the tree."""

    number: int
    uuid: str
    parent: str | None
    time_s: float | None
    blocks: tuple[Any, ...] = ()  # content of a user's line
    answers: frozenset[str] = frozenset()  # ids of the tool calls whose results it has
    response: Response | None = None  # of an assistant's line


@dataclass(slots=True)
class Response:
    """A response of the API, from the first of its lines on."""

    key: tuple[str, str]
    line: int
    index: int | None
    first: TranscriptLine | None = None
    blocks: list[Any] = field(default_factory=list)
    calls: dict[str, TranscriptLine | None] = field(default_factory=dict)  # tool call -> its result
    message: dict[str, Any] = field(default_factory=dict)  # of the line with the final usage
    info: dict[str, Any] = field(default_factory=dict)  # the first line without its message
    end_s: float | None = None
    prompt: History | None = None
    is_copy: bool = False  # an earlier file has it


@dataclass(frozen=True, slots=True)
class History:
    """Messages of a prompt as a list that shares its head with the prompts of earlier turns."""

    head: History | None
    segments: tuple[Segment, ...]
    num_messages: int
    start_s: float | None  # when the last message was there
    parent: Response | None  # the previous turn

    def flat(self) -> tuple[Segment, ...]:
        """All segments in order."""
        parts: list[tuple[Segment, ...]] = []
        history: History | None = self
        while history is not None:
            parts.append(history.segments)
            history = history.head
        return tuple(segment for part in reversed(parts) for segment in part)


class TranscriptTree:
    """Lines of one file by uuid."""

    def __init__(self) -> None:
        self._lines: dict[str, TranscriptLine] = {}

    def add(self, line: TranscriptLine) -> None:
        """Add a line below its parent; a result of a tool call is kept with the call as well."""
        self._lines.setdefault(line.uuid, line)
        if not line.answers:
            return
        above = self._lines.get(line.parent or "")
        while above is not None and above.response is None:
            above = self._lines.get(above.parent or "")
        if above is not None and above.response is not None:
            for call in line.answers & above.response.calls.keys():
                if above.response.calls[call] is None:
                    above.response.calls[call] = line

    def root(self, line: TranscriptLine) -> TranscriptLine:
        """The first line of a line's branch."""
        seen = 0
        while (above := self._lines.get(line.parent or "")) is not None and seen <= len(
            self._lines
        ):
            line, seen = above, seen + 1
        return line

    def history(self, first: TranscriptLine) -> History:
        """The messages before a response: those of the previous response on its branch, and what followed.

        Results of parallel tool calls are siblings in the tree, and all of them are in the prompt.
        """
        lines: list[TranscriptLine] = []
        seen = {first.uuid}
        line = self._lines.get(first.parent or "")
        while line is not None and line.response is None and line.uuid not in seen:
            seen.add(line.uuid)
            lines.append(line)
            line = self._lines.get(line.parent or "")
        lines.reverse()
        previous = None if line is None else line.response
        head = None if previous is None else previous.prompt
        number = 0 if head is None else head.num_messages
        segments: list[Segment] = []
        if previous is not None:
            message = {"role": "assistant", "content": previous.blocks}
            segments += anthropic_message(message, number)
            number += 1
            on_branch = {id(item) for item in lines}
            results = {
                id(item): item
                for item in previous.calls.values()
                if item is not None and id(item) not in on_branch
            }
            lines = [*results.values(), *lines]
        blocks = [block for item in lines for block in item.blocks]
        if blocks:
            # A lone text is sent as a string.
            alone = len(blocks) == 1 and isinstance(blocks[0], str)
            content = blocks[0] if alone else list(map(_block, blocks))
            segments += anthropic_message({"role": "user", "content": content}, number)
            number += 1
        times = [item.time_s for item in lines if item.time_s is not None]
        return History(head, tuple(segments), number, max(times, default=None), previous)


def _block(block: Any) -> Any:
    return {"type": "text", "text": block} if isinstance(block, str) else block
