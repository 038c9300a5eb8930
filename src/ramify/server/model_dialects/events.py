"""What a parser yields while an answer is generated: text, reasoning, and parts of tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of the answer, without delimiters."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """New text of what the model thinks before it answers, without delimiters."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins: its name is complete and is one of the request's tools."""

    name: str
    id: str  # "call_…", or in the form that the family's chat template needs


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """New text of a call's arguments: a JSON object, unless the model itself wrote something else."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call ends. Follows every `CallStart`, before another call or text begins."""

    is_complete: bool = True  # False: the answer was cut off inside the call


OutputEvent = TextDelta | ReasoningDelta | CallStart | ArgumentsDelta | CallEnd


class OutputParser(Protocol):
    """Splits a streamed answer into events; one parser for each answer.

    How the text is cut into pieces changes how the events are cut, never what they add up to.
    """

    def feed(self, text: str, *, is_last: bool = False) -> list[OutputEvent]:
        """Append text of the answer; returns the events that are certain now.

        Args:
            is_last: the answer ends here. Returns everything that was held back; open calls end.
        """
        ...
