"""Responses API: the output items of an answer, and the events of a stream that build them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ramify.outputs import FinishReason
from ramify.server.answers.answer import (
    EMPTY_TEXT,
    AnswerPart,
    AnswerParts,
    PartBegin,
    PartDelta,
    PartEnd,
    PartEvent,
)
from ramify.server.openai.responses.calls import ITEM_TYPES as CALL_TYPES
from ramify.server.openai.responses.calls import NumberedEvent, StreamedCall, streamed_call
from ramify.server.openai.responses.store import item_id
from ramify.server.openai.responses.tools import CallForm
from ramify.server.request_fields.opaque_text import encode_opaque

# Types of an item and of its only content part, by kind of answer part.
ITEM_TYPES = {"text": "message", "reasoning": "reasoning"}
CONTENT_TYPES = {"text": "output_text", "reasoning": "reasoning_text"}


class OutputItems:
    """The output items of an answer: one for each of its parts, in order.

    Args:
        response_id: which the ids of the items are made of.
        forms: how calls are returned, by the name of their function.
        logprobs: entries of the whole answer's tokens; its first message has them.
        carries_reasoning: reasoning items have `encrypted_content`, for clients that send only that
            back with the next request.
    """

    def __init__(
        self,
        answer: AnswerParts,
        response_id: str,
        forms: Mapping[str, CallForm],
        logprobs: Callable[[], list[dict[str, Any]]],
        *,
        carries_reasoning: bool,
    ) -> None:
        self._answer, self._logprobs = answer, logprobs
        self._carries_reasoning = carries_reasoning
        self._response_id, self._forms = response_id, forms
        self._calls: dict[int, StreamedCall] = {}  # by index of the part

    def as_json(self) -> list[dict[str, Any]]:
        """All items, after the end of the answer; an empty answer is an empty message."""
        return [self._item(part, self._status(part)) for part in self._answer.parts or [EMPTY_TEXT]]

    def events(self, change: PartEvent, event: NumberedEvent) -> list[dict[str, Any]]:
        """The events of a change of the answer."""
        match change:
            case PartBegin(part):
                return self._begin_events(part, event)
            case PartDelta(part, text):
                return self._delta_events(part, text, event)
            case PartEnd(part):
                return self._end_events(part, event)

    def empty_events(self, event: NumberedEvent) -> list[dict[str, Any]]:
        """The events of an empty answer."""
        return [*self._begin_events(EMPTY_TEXT, event), *self._end_events(EMPTY_TEXT, event)]

    def _begin_events(self, part: AnswerPart, event: NumberedEvent) -> list[dict[str, Any]]:
        if part.kind == "call":
            return self._call(part).begin(event)
        item = self._item(part, "in_progress")
        added = event("output_item.added", output_index=part.index, item=item)
        content = self._content(part, is_ended=False)
        return [added, event("content_part.added", **self._content_place(part), part=content)]

    def _delta_events(
        self, part: AnswerPart, text: str, event: NumberedEvent
    ) -> list[dict[str, Any]]:
        if part.kind == "call":
            return self._call(part).delta(text, event)
        fields: dict[str, Any] = {"logprobs": []} if part.kind == "text" else {}
        kind = f"{CONTENT_TYPES[part.kind]}.delta"
        return [event(kind, **self._content_place(part), delta=text, **fields)]

    def _end_events(self, part: AnswerPart, event: NumberedEvent) -> list[dict[str, Any]]:
        if part.kind == "call":
            return self._call(part).end(self._status(part), event)
        item, text = self._item(part, self._status(part)), part.text
        place = self._content_place(part)
        fields: dict[str, Any] = {"text": text} | ({"logprobs": []} if part.kind == "text" else {})
        return [
            event(f"{CONTENT_TYPES[part.kind]}.done", **place, **fields),
            event("content_part.done", **place, part=item["content"][0]),
            event("output_item.done", output_index=part.index, item=item),
        ]

    def _status(self, part: AnswerPart) -> str:
        """`status` of an ended item: whatever was cut off is incomplete."""
        reason, parts = self._answer.finish_reason, self._answer.parts
        was_cut = reason not in (None, FinishReason.STOP) and (not parts or part is parts[-1])
        if part.kind == "call":
            was_cut = not part.is_complete
        return "incomplete" if was_cut else "completed"

    def _call(self, part: AnswerPart) -> StreamedCall:
        """The item of a call, which its events share."""
        if part.index not in self._calls:
            form = self._forms.get(part.name) or CallForm("function", part.name)
            name = self._id(part, CALL_TYPES[form.kind])
            self._calls[part.index] = streamed_call(part, form, name)
        return self._calls[part.index]

    def _id(self, part: AnswerPart, item_type: str) -> str:
        return item_id(item_type, self._response_id, part.index, is_output=True)

    def _content_place(self, part: AnswerPart) -> dict[str, Any]:
        name = self._id(part, ITEM_TYPES[part.kind])
        return {"item_id": name, "output_index": part.index, "content_index": 0}

    def _item(self, part: AnswerPart, status: str) -> dict[str, Any]:
        is_ended = status != "in_progress"
        if part.kind == "call":
            return self._call(part).as_json(status)
        content = [self._content(part, is_ended=True)] if is_ended else []
        kind = ITEM_TYPES[part.kind]
        item: dict[str, Any] = {"id": self._id(part, kind), "type": kind}
        if part.kind == "text":
            return item | {"role": "assistant", "status": status, "content": content}
        item |= {"summary": [], "content": content, "status": status}
        if self._carries_reasoning:
            item["encrypted_content"] = encode_opaque(part.text) if is_ended else None
        return item

    def _content(self, part: AnswerPart, *, is_ended: bool) -> dict[str, Any]:
        text = part.text if is_ended else ""
        content: dict[str, Any] = {"type": CONTENT_TYPES[part.kind], "text": text}
        if part.kind == "reasoning":
            return content
        has_logprobs = part.number == 0 and text
        return content | {"annotations": [], "logprobs": self._logprobs() if has_logprobs else []}
