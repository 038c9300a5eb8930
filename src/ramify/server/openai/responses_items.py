"""Responses API: the output items of an answer, and the events of a stream that build them."""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Callable
from typing import Any

from ramify.outputs import FinishReason
from ramify.server.answer import Answer, AnswerPart, PartBegin, PartDelta, PartEnd, PartEvent

CARRIED_MARK = "ramify:"  # `encrypted_content` that holds reasoning of this server begins with it

# Types of an item and of its only content part, and the beginning of its id, by kind of answer part.
ITEM_TYPES = {"text": "message", "reasoning": "reasoning"}
CONTENT_TYPES = {"text": "output_text", "reasoning": "reasoning_text"}
ID_PREFIXES = {"text": "msg_", "reasoning": "rs_"}


NumberedEvent = Callable[..., dict[str, Any]]  # the next of a stream: `event("completed", …)`


def carried_reasoning(text: str) -> str:
    """Reasoning as `encrypted_content`: opaque to clients, and only encoded."""
    return CARRIED_MARK + base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()


def read_carried_reasoning(carried: str) -> str:
    """The reasoning of an `encrypted_content`; "" if another server wrote it."""
    if not carried.startswith(CARRIED_MARK):
        return ""
    try:
        return base64.b64decode(carried[len(CARRIED_MARK) :], validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


class OutputItems:
    """The output items of an answer: one for each of its parts, in order.

    Args:
        logprobs: entries of the whole answer's tokens; its first message has them.
        carries_reasoning: reasoning items have `encrypted_content`, for clients that send only that
            back with the next request.
    """

    def __init__(
        self,
        answer: Answer,
        logprobs: Callable[[], list[dict[str, Any]]],
        *,
        carries_reasoning: bool,
    ) -> None:
        self._answer, self._logprobs = answer, logprobs
        self._carries_reasoning = carries_reasoning
        self._id_stem = secrets.token_hex(12)

    def as_json(self) -> list[dict[str, Any]]:
        """All items, after the end of the answer; an empty answer is an empty message."""
        return [self._item(part, self._status(part)) for part in self._answer.parts or [_EMPTY]]

    def events(self, change: PartEvent, event: NumberedEvent) -> list[dict[str, Any]]:
        """The events of a change of the answer."""
        match change:
            case PartBegin(part):
                return self._begin_events(part, event)
            case PartDelta(part, text):
                return [self._delta_event(part, text, event)]
            case PartEnd(part):
                return self._end_events(part, event)

    def empty_events(self, event: NumberedEvent) -> list[dict[str, Any]]:
        """The events of an empty answer."""
        return [*self._begin_events(_EMPTY, event), *self._end_events(_EMPTY, event)]

    def _begin_events(self, part: AnswerPart, event: NumberedEvent) -> list[dict[str, Any]]:
        item = self._item(part, "in_progress")
        added = event("output_item.added", output_index=part.index, item=item)
        if part.kind == "call":
            return [added]
        content = self._content(part, is_ended=False)
        return [added, event("content_part.added", **self._content_place(part), part=content)]

    def _delta_event(self, part: AnswerPart, text: str, event: NumberedEvent) -> dict[str, Any]:
        if part.kind == "call":
            return event("function_call_arguments.delta", **self._item_place(part), delta=text)
        fields: dict[str, Any] = {"logprobs": []} if part.kind == "text" else {}
        kind = f"{CONTENT_TYPES[part.kind]}.delta"
        return event(kind, **self._content_place(part), delta=text, **fields)

    def _end_events(self, part: AnswerPart, event: NumberedEvent) -> list[dict[str, Any]]:
        item, text = self._item(part, self._status(part)), part.text
        item_done = {"output_index": part.index, "item": item}
        if part.kind == "call":
            fields = self._item_place(part) | {"name": part.name, "arguments": text}
            return [
                event("function_call_arguments.done", **fields),
                event("output_item.done", **item_done),
            ]
        place = self._content_place(part)
        fields = {"text": text} | ({"logprobs": []} if part.kind == "text" else {})
        return [
            event(f"{CONTENT_TYPES[part.kind]}.done", **place, **fields),
            event("content_part.done", **place, part=item["content"][0]),
            event("output_item.done", **item_done),
        ]

    def _status(self, part: AnswerPart) -> str:
        """`status` of an ended item: whatever was cut off is incomplete."""
        reason, parts = self._answer.finish_reason, self._answer.parts
        was_cut = reason not in (None, FinishReason.STOP) and (not parts or part is parts[-1])
        if part.kind == "call":
            was_cut = not part.is_complete
        return "incomplete" if was_cut else "completed"

    def _id(self, part: AnswerPart) -> str:
        if part.kind == "call":
            return part.id.replace("call_", "fc_", 1)
        return f"{ID_PREFIXES[part.kind]}{self._id_stem}{part.index:08x}"

    def _item_place(self, part: AnswerPart) -> dict[str, Any]:
        return {"item_id": self._id(part), "output_index": part.index}

    def _content_place(self, part: AnswerPart) -> dict[str, Any]:
        return self._item_place(part) | {"content_index": 0}

    def _item(self, part: AnswerPart, status: str) -> dict[str, Any]:
        is_ended = status != "in_progress"
        if part.kind == "call":
            return {
                "id": self._id(part),
                "type": "function_call",
                "call_id": part.id,
                "name": part.name,
                "arguments": part.text if is_ended else "",
                "status": status,
            }
        content = [self._content(part, is_ended=True)] if is_ended else []
        item: dict[str, Any] = {"id": self._id(part), "type": ITEM_TYPES[part.kind]}
        if part.kind == "text":
            return item | {"role": "assistant", "status": status, "content": content}
        item |= {"summary": [], "content": content, "status": status}
        if self._carries_reasoning:
            item["encrypted_content"] = carried_reasoning(part.text) if is_ended else None
        return item

    def _content(self, part: AnswerPart, *, is_ended: bool) -> dict[str, Any]:
        text = part.text if is_ended else ""
        content: dict[str, Any] = {"type": CONTENT_TYPES[part.kind], "text": text}
        if part.kind == "reasoning":
            return content
        has_logprobs = part.number == 0 and text
        return content | {"annotations": [], "logprobs": self._logprobs() if has_logprobs else []}


_EMPTY = AnswerPart("text", 0, 0)  # stands for an answer without parts; nothing is added to it
