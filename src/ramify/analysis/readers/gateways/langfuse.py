"""Langfuse: rows of the blob export, of the API (camelCase) and of the legacy export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ramify.analysis.reader import LogFormat, ReadQuality, Row, RowReader
from ramify.analysis.readers.bodies.exchanges import FAILED, NO_REQUEST, Exchange, requests_of_rows
from ramify.analysis.readers.bodies.segments import compact_json
from ramify.analysis.readers.bodies.usage import count, first_count, parse_usage
from ramify.analysis.readers.gateways.langchain_messages import chat_messages, is_items
from ramify.analysis.readers.nested_json import decode_nested, is_cut_json
from ramify.analysis.readers.row_fields import first_text, first_value, mapping_in
from ramify.analysis.readers.times import Times, time_of
from ramify.analysis.records import LoggedRequest, Usage

_TYPES = (
    """GENERATION SPAN EVENT AGENT TOOL CHAIN RETRIEVER EVALUATOR EMBEDDING GUARDRAIL""".split()
)
_USAGE_KEYS = ("usage_details", "usageDetails", "usage")
_MODEL_KEYS = ("provided_model_name", "providedModelName", "model")
_SESSION_KEYS = ("session_id", "sessionId", "langfuse_session_id")
_BODY_KEYS = ("messages", "input", "prompt", "instructions")
_MESSAGE_KEYS = ("role", "kwargs")


def is_langfuse_row(value: Any) -> bool:
    """Whether a row is an observation, a trace with observations, or a page of the API."""
    if not isinstance(value, dict):
        return False
    if _is_observation(value) or _is_trace(value):
        return True
    rows = _rows_of(value)
    return rows is not value and any(_is_observation(item) for item in rows)


def _is_observation(value: Any) -> bool:
    if not isinstance(value, dict) or not ("trace_id" in value or "traceId" in value):
        return False
    if "usage_details" in value or "usageDetails" in value:
        return True
    return value.get("type") in _TYPES and ("start_time" in value or "startTime" in value)


def _is_trace(value: Mapping[str, Any]) -> bool:
    """Whether a row is of the legacy file `traces/`, which names the session."""
    return (
        ("session_id" in value or "sessionId" in value)
        and "timestamp" in value
        and ("bookmarked" in value or "public" in value)
    )


def _rows_of(value: Mapping[str, Any]) -> Any:
    """The observations of a trace or of a page."""
    for key in ("observations", "data"):
        rows = value.get(key)
        if isinstance(rows, list) and any(isinstance(item, dict) for item in rows):
            return rows
    return value


class LangfuseReader(RowReader):
    """Each GENERATION that did not fail is a request.

    A trace read before its observations gives them its session (legacy export: name the folder
    `traces` first).
    """

    def __init__(self, quality: ReadQuality) -> None:
        self._quality = quality
        self._sessions: dict[str, str] = {}
        self._seen: set[int] = set()

    def feed(self, row: Row) -> Iterator[LoggedRequest]:
        """See `RowReader`."""
        if _is_trace(row.value):
            self._remember(row.value)
        rows = _rows_of(row.value)
        if rows is row.value:
            if not _is_observation(row.value):
                self._quality.skipped[NO_REQUEST] += 1
                return
            rows = [rows]
        yield from requests_of_rows(row, self._quality, rows, self._exchange_of)

    def _remember(self, trace: Mapping[str, Any]) -> None:
        identity, session = first_text(trace, ("id",)), first_text(trace, _SESSION_KEYS)
        if identity is not None and session is not None:
            self._sessions[identity] = session

    def _exchange_of(self, value: Mapping[str, Any]) -> Exchange | None:
        if value.get("type", "GENERATION") != "GENERATION":
            self._quality.skipped[NO_REQUEST] += 1
            return None
        if value.get("level") == "ERROR":
            self._quality.skipped[FAILED] += 1
            return None
        identity = first_text(value, ("id",))
        if identity is not None:
            if hash(identity) in self._seen:
                self._quality.skipped["logged twice"] += 1
                return None
            self._seen.add(hash(identity))
        metadata = mapping_in(value.get("metadata"))
        session = first_text(value, _SESSION_KEYS) or first_text(metadata, _SESSION_KEYS)
        trace = first_text(value, ("trace_id", "traceId"))
        return Exchange(
            body=_body_of(value),
            response=_response_of(value.get("output")),
            usage=_usage_of(mapping_in(first_value(value, _USAGE_KEYS))),
            times=Times.in_order(
                time_of(value, "start_time", "startTime"),
                time_of(value, "completion_start_time", "completionStartTime"),
                time_of(value, "end_time", "endTime"),
            ),
            request_id=identity,
            conversation=session or self._sessions.get(trace or ""),
            template=_template_of(value),
        )


def _template_of(value: Mapping[str, Any]) -> str | None:
    name = first_text(value, ("prompt_name", "promptName"))
    version = first_text(value, ("prompt_version", "promptVersion"))
    return name if name is None or version is None else f"{name}@{version}"


def _body_of(value: Mapping[str, Any]) -> Any:
    model = first_text(value, _MODEL_KEYS)
    given = decode_nested(value.get("input"))
    if given is None or given in ("", {}, []):
        return {} if model is None else {"model": model}
    if isinstance(given, dict):
        if not any(key in given for key in _BODY_KEYS):
            is_message = any(key in given for key in _MESSAGE_KEYS)
            given = {"messages": [given]} if is_message else {"prompt": compact_json(given)}
    elif isinstance(given, list):
        given = {"input" if is_items(given) else "messages": given}
    else:
        if is_cut_json(given):
            return {} if model is None else {"model": model}
        given = {"prompt": str(given)}
    parameters = mapping_in(first_value(value, ("model_parameters", "modelParameters")))
    body = {"model": model, **parameters, **given}
    if "messages" in body:
        body["messages"] = chat_messages(decode_nested(body["messages"]))
    if isinstance(body.get("input"), str):
        body["input"] = decode_nested(body["input"])
    tools = first_value(value, ("tool_definitions", "toolDefinitions"))
    if tools and not body.get("tools"):
        body["tools"] = _tools_of(decode_nested(tools))
    return body


def _tools_of(tools: Any) -> list[Any]:
    """Tools from a list, or from an object with a definition for each name."""
    if isinstance(tools, list):
        return [decode_nested(tool) for tool in tools]
    if not isinstance(tools, dict):
        return []
    functions = []
    for name, definition in tools.items():
        fields = mapping_in(definition)
        functions.append(
            fields if "name" in fields or "function" in fields else {"name": name, **fields}
        )
    return functions


def _response_of(output: Any) -> Any:
    """The output as a response of a vendor: SDKs store the message alone."""
    value = decode_nested(output)
    if isinstance(value, dict) and "role" in value and "choices" not in value and "id" not in value:
        return {"choices": [{"message": value}]}
    return value if isinstance(value, dict) else None


def _usage_of(usage: Mapping[str, Any]) -> Usage:
    """Counts of `usage_details`, whose keys do not overlap.

    Langfuse takes cached tokens out of `input`, LiteLLM only those that were read, other clients none:
    `total` tells, if it is the sum of all tokens.
    """
    if "input" not in usage:
        return parse_usage(usage)
    rest, output, total = (count(usage.get(key)) for key in ("input", "output", "total"))
    read = first_count(usage, "input_cached_tokens", "input_cache_read", "cache_read_input_tokens",
                  "input_cached_tokens_read", "cached_tokens")  # fmt: skip
    written = first_count(usage, "input_cache_creation", "cache_creation_input_tokens",
                     "input_cache_write_tokens", "input_cache_creation_tokens", "input_cache_write")  # fmt: skip
    cached = (read or 0) + (written or 0)
    num_input = rest
    if rest is not None:
        others = sum(
            count(value) or 0
            for key, value in usage.items()
            if key.startswith("input_") and "cache" not in key
        )
        num_input = rest + cached + others
        if total is not None and output is not None and rest >= (written or 0):
            inside = [rest + (read or 0)] + ([rest] if rest >= cached else [])
            num_input = next((item for item in inside if item == total - output), num_input)
    return Usage(
        num_input=num_input,
        num_read=read,
        num_written=written,
        num_written_1h=first_count(
            usage, "input_ephemeral_1h_input_tokens", "ephemeral_1h_input_tokens"
        ),
        num_output=output,
    )


LANGFUSE = LogFormat("langfuse", is_langfuse_row, LangfuseReader)
