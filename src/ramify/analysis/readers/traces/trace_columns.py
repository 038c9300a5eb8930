"""Published traces as a table: which keys of their rows hold which field of a `LoggedRequest`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ramify.analysis.reader import BadRowError, Row
from ramify.analysis.readers.bodies.usage import count
from ramify.analysis.readers.row_fields import names_in
from ramify.analysis.readers.row_values import get_name, get_number, get_time, quoted
from ramify.analysis.readers.times import later
from ramify.analysis.records import LoggedRequest, Usage

T = TypeVar("T")
MAX_COUNT = 1 << 53


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceColumns:
    """Keys of a trace's rows, the best first and with commas between; empty where no key holds the field.

    A value of another type makes the row bad.
    """

    per_s: float = 1.0  # units of times and durations in a second
    start: str = ""
    has_dates: bool = False  # the start is a date, or a time in any unit
    first_output: str = ""  # since the start
    duration: str = ""
    request_id: str = ""
    conversation: str = ""
    model: str = ""
    num_input: str = ""
    num_read: str = ""
    num_output: str = ""

    def request(self, row: Row, value: Mapping[str, Any], **fields: Any) -> LoggedRequest:
        """The request of a value in a row; `fields` go before what the keys hold."""
        start_s = fields["start_s"] if "start_s" in fields else self.start_s(value)
        in_columns: dict[str, Any] = {
            "index": row.index,
            "request_id": _first(get_name, value, self.request_id),
            "conversation": _first(get_name, value, self.conversation),
            "start_s": start_s,
            "first_output_s": later(start_s, self.seconds(value, self.first_output)),
            "end_s": later(start_s, self.seconds(value, self.duration)),
            "model": _first(get_name, value, self.model),
            "usage": self.usage(value),
        }
        return LoggedRequest(row.file, row.line, **(in_columns | fields))

    def start_s(self, value: Mapping[str, Any]) -> float | None:
        """When a request began."""
        get = get_time if self.has_dates else self._get_seconds
        return _first(get, value, self.start)

    def seconds(self, value: Mapping[str, Any], names: str) -> float | None:
        """A time or a duration."""
        return _first(self._get_seconds, value, names)

    def _get_seconds(self, value: Mapping[str, Any], name: str) -> float | None:
        number = get_number(value, name)
        return None if number is None else number / self.per_s

    def usage(self, value: Mapping[str, Any]) -> Usage:
        """Counts of a request."""
        return Usage(
            num_input=_first(_get_count, value, self.num_input),
            num_read=_first(_get_count, value, self.num_read),
            num_output=_first(_get_count, value, self.num_output),
        )


def _first(
    get: Callable[[Mapping[str, Any], str], T | None], value: Mapping[str, Any], names: str
) -> T | None:
    """What `get` reads under the first name with a value."""
    for name in names_in(names):
        if value.get(name) not in (None, ""):
            return get(value, name)
    return None


def _get_count(value: Mapping[str, Any], name: str) -> int:
    number = count(value[name])
    if number is None or number >= MAX_COUNT:
        raise BadRowError(f"{name} is {quoted(value[name])}, not a count")
    return number


MOONCAKE = TraceColumns(
    per_s=1000, start="timestamp, created_time, not_before_ms", duration="recorded_api_time_ms",
    request_id="request_id", conversation="session_id", model="model",
    num_input="input_length, input_tokens", num_output="output_length, output_tokens",
)  # fmt: skip
BAILIAN = TraceColumns(
    start="timestamp", request_id="chat_id", num_input="input_length", num_output="output_length",
)  # fmt: skip
WEKA = TraceColumns(
    start="t", first_output="ttft", duration="api_time", model="model",
    num_input="in, input_length", num_output="out, output_length",
)  # fmt: skip
DYNAMO = TraceColumns(
    per_s=1000, start="request_received_ms", first_output="ttft_ms", duration="total_time_ms",
    request_id="request_id", model="model",
    num_input="input_tokens, input_length", num_read="cached_tokens", num_output="output_tokens",
)  # fmt: skip
RAMIFY = TraceColumns(
    per_s=1000, request_id="id", conversation="conversation", model="model",
    num_input="input_length", num_read="hit", num_output="output_length",
)  # fmt: skip
AZURE = TraceColumns(
    start="TIMESTAMP", has_dates=True, num_input="ContextTokens", num_output="GeneratedTokens",
)  # fmt: skip
BURST_GPT = TraceColumns(
    start="Timestamp", has_dates=True, conversation="Session ID", model="Model",
    num_input="Request tokens", num_output="Response tokens",
)  # fmt: skip
COPILOT = TraceColumns(
    per_s=1000, start="timestamp", has_dates=True, duration="duration_ms", model="model",
    num_input="prompt", num_read="cached", num_output="completion",
)  # fmt: skip
