"""Langfuse: rows of the blob export, of the API (camelCase) and of the legacy export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ramify.analysis.reader import LogFormat, ReadQuality, RowReader
from ramify.analysis.readers.bodies.exchanges import FAILED, NO_REQUEST, Exchange
from ramify.analysis.readers.bodies.segments import compact_json
from ramify.analysis.readers.bodies.usage import count, first_count, parse_usage
from ramify.analysis.readers.columns import Columns, columns_reader, text_at, value_at
from ramify.analysis.readers.gateways.langchain_messages import chat_messages, is_items
from ramify.analysis.readers.nested_json import decode_nested, is_cut_json
from ramify.analysis.readers.row_fields import mapping_in
from ramify.analysis.records import Usage

_TYPES = (
    """GENERATION SPAN EVENT AGENT TOOL CHAIN RETRIEVER EVALUATOR EMBEDDING GUARDRAIL""".split()
)
_BODY_KEYS = ("messages", "input", "prompt", "instructions")
_MESSAGE_KEYS = ("role", "kwargs")
_SESSIONS = "session_id, sessionId, langfuse_session_id"
_READ = (
    "input_cached_tokens input_cache_read cache_read_input_tokens input_cached_tokens_read "
    "cached_tokens".split()
)
_WRITTEN = (
    "input_cache_creation cache_creation_input_tokens input_cache_write_tokens "
    "input_cache_creation_tokens input_cache_write".split()
)
_WRITTEN_1H = ("input_ephemeral_1h_input_tokens", "ephemeral_1h_input_tokens")


def is_langfuse_row(value: Any) -> bool:
    """Whether a row is an observation, a trace with observations, or a page of the API."""
    if not isinstance(value, dict):
        return False
    return _is_trace(value) or any(map(_is_observation, _observations_of(value)))


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


def _observations_of(value: Mapping[str, Any]) -> Sequence[Any]:
    """The observations in a trace or a page; else the row itself, if it is one."""
    for key in ("observations", "data"):
        rows = value.get(key)
        if isinstance(rows, list) and any(isinstance(item, dict) for item in rows):
            return rows
    return (value,) if _is_observation(value) else ()


COLUMNS = Columns(
    skips=(
        (NO_REQUEST, lambda row: row.get("type", "GENERATION") != "GENERATION"),
        (FAILED, lambda row: row.get("level") == "ERROR"),
    ),
    identity=("id",),
    objects="metadata",
    start="start_time, startTime",
    first_output="completion_start_time, completionStartTime",
    end="end_time, endTime",
    request_id="id",
    conversation=f"""{_SESSIONS}, metadata.session_id, metadata.sessionId,
        metadata.langfuse_session_id""",
    model="provided_model_name, providedModelName, model",
)


class _Observations:
    """Exchanges of observations, which may have their session from a trace (legacy export).

    Such a trace has to be read before its observations: name the folder `traces` first.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, str] = {}

    def rows_of(self, value: Mapping[str, Any]) -> Sequence[Any]:
        """The observations of a row; remembers the session of a trace."""
        if _is_trace(value):
            trace, session = text_at(value, "id"), text_at(value, _SESSIONS)
            if trace is not None and session is not None:
                self._sessions[trace] = session
        return _observations_of(value)

    def exchange_of(self, row: Mapping[str, Any]) -> Exchange:
        """The exchange of an observation."""
        trace = text_at(row, "trace_id, traceId")
        return COLUMNS.exchange(
            row,
            body=_body_of(row),
            response=_response_of(row.get("output")),
            usage=_usage_of(mapping_in(value_at(row, "usage_details, usageDetails, usage"))),
            conversation=text_at(row, COLUMNS.conversation) or self._sessions.get(trace or ""),
            template=_template_of(row),
        )


def _template_of(row: Mapping[str, Any]) -> str | None:
    name = text_at(row, "prompt_name, promptName")
    version = text_at(row, "prompt_version, promptVersion")
    return name if name is None or version is None else f"{name}@{version}"


def _body_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """A body of the input, which is one, or messages, items or text; and of the columns beside it."""
    given = decode_nested(row.get("input"))
    if given in (None, "", {}, []) or is_cut_json(given):
        return {}
    if isinstance(given, list):
        given = {"input" if is_items(given) else "messages": given}
    elif not isinstance(given, dict):
        given = {"prompt": str(given)}
    elif not any(key in given for key in _BODY_KEYS):
        is_message = any(key in given for key in _MESSAGE_KEYS)
        given = {"messages": [given]} if is_message else {"prompt": compact_json(given)}
    parameters = mapping_in(value_at(row, "model_parameters, modelParameters"))
    body = {"model": text_at(row, COLUMNS.model), **parameters, **given}
    if "messages" in body:
        body["messages"] = chat_messages(decode_nested(body["messages"]))
    if isinstance(body.get("input"), str):
        body["input"] = decode_nested(body["input"])
    tools = value_at(row, "tool_definitions, toolDefinitions")
    if tools and not body.get("tools"):
        body["tools"] = _tools_of(decode_nested(tools))
    return body


def _tools_of(tools: Any) -> list[Any]:
    """Tools from a list, or from an object with a definition for each name."""
    if isinstance(tools, list):
        return [decode_nested(tool) for tool in tools]
    if not isinstance(tools, dict):
        return []
    functions = ((name, mapping_in(definition)) for name, definition in tools.items())
    return [
        fields if "name" in fields or "function" in fields else {"name": name, **fields}
        for name, fields in functions
    ]


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
    read, written = first_count(usage, *_READ), first_count(usage, *_WRITTEN)
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
    return Usage(num_input, read, written, first_count(usage, *_WRITTEN_1H), output)


def _reader(quality: ReadQuality) -> RowReader:
    observations = _Observations()
    return columns_reader(COLUMNS, observations.exchange_of, quality, rows_of=observations.rows_of)


LANGFUSE = LogFormat("langfuse", is_langfuse_row, _reader)
