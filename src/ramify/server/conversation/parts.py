"""Messages of a request as parts: the same for all APIs.

A part knows the request field that it came from. Of each message, `Message.as_template` makes what
chat templates take, and `Message.prompt_parts` what the renderer locates in the prompt.

Media travel as `MediaPart`, among the lines of a text: `line_text` writes a placeholder in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from typing import Any

from ramify.server.prompts.content_placeholders import (
    MEDIA_NOUNS,
    PLACEHOLDER_NOUNS,
    content_placeholder,
)
from ramify.server.prompts.prompt_parts import (
    PromptPart,
    call_variants,
    result_variants,
    text_variants,
)


@dataclass(frozen=True, slots=True)
class MediaPart:
    """An image, audio, video or file, of which only place and type are kept.

    Args:
        kind: the `type` of its block; `content_placeholder` has a text for it.
    """

    path: str
    kind: str


Line = str | MediaPart


def line_text(lines: Iterable[Line]) -> str:
    """The lines as text of the prompt, with placeholders for media."""
    return "\n".join(
        (content_placeholder(line.kind) or "") if isinstance(line, MediaPart) else line
        for line in lines
    )


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text of one request field.

    Args:
        path: of the field; "" if it is not looked up in the prompt.
        ttl_s: of the breakpoint at its end; None: there is none.
    """

    path: str
    lines: tuple[Line, ...]
    ttl_s: float | None = None

    @property
    def text(self) -> str:
        """What the prompt has of it."""
        return line_text(self.lines)


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """What the model thought before an answer. `path` and `ttl_s` as of a text."""

    path: str
    text: str
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True)
class HiddenPart:
    """A field of which the model sees nothing. A breakpoint may stand there."""

    path: str
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True)
class CallPart:
    """A call of a tool that the model made."""

    path: str
    name: str
    arguments: dict[str, Any]
    id: str = ""
    ttl_s: float | None = None

    @property
    def as_template(self) -> dict[str, Any]:
        """The call as chat templates take it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ResultPart:
    """The result of a call, a message of its own in the prompt.

    Args:
        call_id, name: of the call and of its tool; None: the client sent none.
    """

    texts: tuple[TextPart, ...]
    call_id: str | None = None
    name: str | None = None

    @property
    def as_template(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        content = line_text(line for text in self.texts for line in text.lines)
        named = {"name": self.name, "tool_call_id": self.call_id}
        given = {field: value for field, value in named.items() if value is not None}
        return {"role": "tool", "content": content, **given}


Part = TextPart | ReasoningPart | HiddenPart | CallPart | ResultPart


@dataclass(frozen=True, slots=True)
class Message:
    """A message of the request.

    Args:
        path: its request field: `messages[2]`.
        role: "system", "user", "assistant" or "tool".
        parts: in the order of the prompt; without a text, a call or a thought it is left out.
        name: of who says it; None: the client sent none.
    """

    path: str
    role: str
    parts: tuple[Part, ...]
    name: str | None = None

    @property
    def text(self) -> str:
        """Its texts: without reasoning, calls and results."""
        texts = (part for part in self.parts if isinstance(part, TextPart))
        return line_text(line for text in texts for line in text.lines)

    def as_template(self) -> list[dict[str, Any]]:
        """The messages that chat templates take: one for each result, and one for the rest."""
        messages: list[dict[str, Any]] = []
        lines: list[Line] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for part in self.parts:
            match part:
                case TextPart():
                    lines += part.lines
                case ReasoningPart():
                    thoughts.append(part.text)
                case CallPart():
                    calls.append(part.as_template)
                case ResultPart():
                    if lines:
                        messages.append({"role": self.role, "content": line_text(lines)})
                        lines = []
                    messages.append(part.as_template)
        is_empty_text = not messages and any(isinstance(part, TextPart) for part in self.parts)
        if lines or thoughts or calls or is_empty_text:
            message: dict[str, Any] = {"role": self.role, "content": line_text(lines)}
            if self.name is not None:
                message["name"] = self.name
            if thoughts:
                message["reasoning_content"] = "\n".join(thoughts)
            if calls:
                message["tool_calls"] = calls
            messages.append(message)
        return messages

    def prompt_parts(self) -> Iterator[PromptPart]:
        """The parts that the renderer locates in the prompt."""
        for part in self.parts:
            if isinstance(part, ResultPart):
                for text in part.texts:
                    if text.path:
                        variants = result_variants(text.text)
                        yield PromptPart(text.path, variants, text.ttl_s, "tool")
            elif part.path:
                variants, may_be_dropped = _variants(part)
                yield PromptPart(part.path, variants, part.ttl_s, self.role, may_be_dropped)


def _variants(
    part: TextPart | ReasoningPart | HiddenPart | CallPart,
) -> tuple[tuple[str, ...], bool]:
    """The forms in which templates write a part, and whether they may leave it out."""
    match part:
        case TextPart():
            return text_variants(part.text), False
        case HiddenPart():
            return (), False
        case ReasoningPart():
            return text_variants(part.text), True
        case CallPart():
            return call_variants(part.name, part.arguments), True


def media_of(messages: Iterable[Message]) -> Iterator[MediaPart]:
    """Yield the media of messages, in order."""
    for message in messages:
        for part in message.parts:
            texts = part.texts if isinstance(part, ResultPart) else (part,)
            for text in texts:
                if isinstance(text, TextPart):
                    yield from (line for line in text.lines if isinstance(line, MediaPart))


def unanswered_media(messages: Sequence[Message]) -> MediaPart | None:
    """The first image, audio or video that the answer would have to be about; None: there is none.

    That is of the user, in the turn after the last answer, and no result of a call is in that turn: a tool
    whose result is an image may also put it in a message of the user.
    """
    newest_first = dropwhile(
        _is_answer, reversed(messages)
    )  # what a prefill begins is no answer yet
    turn = [*takewhile(lambda message: not _is_answer(message), newest_first)][::-1]
    if any(isinstance(part, ResultPart) for message in turn for part in message.parts):
        return None
    media = media_of(message for message in turn if message.role == "user")
    return next((item for item in media if PLACEHOLDER_NOUNS.get(item.kind) in MEDIA_NOUNS), None)


def _is_answer(message: Message) -> bool:
    return message.role == "assistant"
