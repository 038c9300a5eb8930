"""Anthropic's lines: `{"custom_id", "params"}` to `{"custom_id", "result"}`."""

from __future__ import annotations

import msgspec

from ramify.server.batches.lines import (
    LineAnswer,
    LineRequest,
    ResultLine,
    Unanswered,
    encoded_line,
)
from ramify.server.batches.protocol import MessageBatchItem
from ramify.server.batches.records import Result

_RESULTS: dict[str, Result] = {
    "succeeded": "succeeded",
    "errored": "errored",
    "canceled": "cancelled",
    "expired": "expired",
}
_TYPES = {result: name for name, result in _RESULTS.items()}


class _Typed(msgspec.Struct):
    type: str


class _Written(msgspec.Struct):
    custom_id: str
    result: _Typed


class AnthropicLines:
    """See LineForm. The lines that it reads were checked when the batch was made."""

    has_single_model = False

    def read(self, line: bytes) -> LineRequest:
        """See LineForm."""
        request = msgspec.json.decode(line, type=MessageBatchItem)
        return LineRequest(request.custom_id, bytes(request.params))

    def answered(self, custom_id: str, answer: LineAnswer) -> ResultLine:
        """See LineForm."""
        body = msgspec.Raw(answer.body)
        if 200 <= answer.status < 300:
            return self._line(custom_id, "succeeded", message=body)
        return self._line(custom_id, "errored", error=body)

    def unanswered(self, custom_id: str, result: Unanswered) -> ResultLine:
        """See LineForm."""
        return self._line(custom_id, result)

    def _line(self, custom_id: str, result: Result, **fields: msgspec.Raw) -> ResultLine:
        payload = {"custom_id": custom_id, "result": {"type": _TYPES[result], **fields}}
        return ResultLine(custom_id, result, encoded_line(payload))

    def result_of(self, line: bytes) -> tuple[str, Result]:
        """See LineForm."""
        written = msgspec.json.decode(line, type=_Written)
        if written.result.type not in _RESULTS:
            raise msgspec.DecodeError(f"no result has the type {written.result.type[:20]!r}")
        return written.custom_id, _RESULTS[written.result.type]
