"""The events of a stored response, rebuilt from its body: equal to those of its stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from ramify.server.openai.responses.calls import CALL_TEXTS
from ramify.server.openai.responses.store import Item, StoredResponse

# Fields of the body that are known at the end only, as they are before it.
BEFORE_END: dict[str, Any] = {
    "status": "in_progress",
    "output": [],
    "usage": None,
    "incomplete_details": None,
}
ONLY_AT_END = ("completed_at", "prompt_cache_diagnostics")


def replayed_events(stored: StoredResponse) -> Iterator[dict[str, Any]]:
    """Yield the data of the response's server-sent events.

    A response that was not streamed has one delta for each text.
    """
    body: dict[str, Any] = msgspec.json.decode(stored.packed_body)
    begun = {name: value for name, value in body.items() if name not in ONLY_AT_END} | BEFORE_END
    for number, (kind, fields) in enumerate(_all_events(body, begun, stored)):
        yield {"type": f"response.{kind}", "sequence_number": number} | fields


def _all_events(
    body: dict[str, Any], begun: dict[str, Any], stored: StoredResponse
) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "created", {"response": begun}
    yield "in_progress", {"response": begun}
    pieces = _Pieces(stored)
    for index, item in enumerate(body["output"]):
        if item["type"] in ("message", "reasoning"):
            yield from _content_events(item, index, pieces)
        elif item["type"] in CALL_TEXTS:
            yield from _call_events(item, index, pieces)
        else:
            yield "output_item.added", _item(item | {"status": "in_progress"}, index)
        yield "output_item.done", _item(item, index)
    yield body["status"], {"response": body}


class _Pieces:
    """Cuts texts as the stream did."""

    def __init__(self, stored: StoredResponse) -> None:
        self._lens = iter(stored.delta_lens)

    def of(self, text: str) -> Iterator[str]:
        """The pieces of the next text."""
        start = 0
        while start < len(text):
            end = start + next(self._lens, len(text))
            yield text[start:end]
            start = end


def _item(item: Item, index: int) -> dict[str, Any]:
    return {"output_index": index, "item": item}


def _content_events(item: Item, index: int, pieces: _Pieces) -> Iterator[tuple[str, Item]]:
    """The events of a message or of reasoning, without the last."""
    [part] = item["content"]
    begun: dict[str, Any] = {"content": [], "status": "in_progress"}
    if "encrypted_content" in item:
        begun["encrypted_content"] = None
    yield "output_item.added", _item(item | begun, index)
    place = {"item_id": item["id"], "output_index": index, "content_index": 0}
    no_logprobs: dict[str, Any] = {"logprobs": []} if "logprobs" in part else {}
    yield "content_part.added", place | {"part": part | {"text": ""} | no_logprobs}
    for piece in pieces.of(part["text"]):
        yield f"{part['type']}.delta", place | {"delta": piece} | no_logprobs
    yield f"{part['type']}.done", place | {"text": part["text"]} | no_logprobs
    yield "content_part.done", place | {"part": part}


def _call_events(item: Item, index: int, pieces: _Pieces) -> Iterator[tuple[str, Item]]:
    """The events of a call with a text, without the last."""
    call = CALL_TEXTS[item["type"]]
    text = item[call.field]
    yield "output_item.added", _item(item | {call.field: "", "status": "in_progress"}, index)
    place = {"item_id": item["id"], "output_index": index}
    for piece in pieces.of(text):
        yield f"{call.events}.delta", place | {"delta": piece}
    name = {"name": item["name"]} if item["type"] == "function_call" else {}
    yield f"{call.events}.done", place | {call.field: text} | name
