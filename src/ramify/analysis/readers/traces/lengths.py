"""Traces that have lengths only: BurstGPT, Azure LLM inference, sessions of Copilot's coding agent.

Their requests have neither text nor hashes, so that nothing can be said about what they share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ramify.analysis.reader import BadRowError, LogFormat, ReadQuality, Row
from ramify.analysis.readers.row_values import RowByRow, get_name, list_of, mapping_of
from ramify.analysis.readers.traces.trace_columns import (
    AZURE,
    BURST_GPT,
    COPILOT,
    MOONCAKE,
    TraceColumns,
)
from ramify.analysis.records import LoggedRequest

LENGTHS_ONLY = "lengths only: neither text nor hashes, so what requests share is unknown"
# Keys by which a trace is known, and its columns.
_TRACES = (
    (("TIMESTAMP", "ContextTokens", "GeneratedTokens"), AZURE),
    (("Timestamp", "Model", "Request tokens", "Response tokens"), BURST_GPT),
    (("input_length", "output_length"), MOONCAKE),
)
_PROMPTS = frozenset({"hash_ids", "messages", "text_input"})


def is_lengths(value: Any) -> bool:
    """Whether a row has the columns of a trace of lengths, or is a session with counts of calls."""
    if not isinstance(value, Mapping):
        return False
    columns = _columns_of(value)
    if columns is not None:
        return columns is not MOONCAKE or _PROMPTS.isdisjoint(value)
    turns = value.get("turns")
    return (
        "session_id" in value
        and isinstance(turns, list)
        and any(isinstance(turn, Mapping) and "llm_calls" in turn for turn in turns)
    )


def _columns_of(value: Mapping[str, Any]) -> TraceColumns | None:
    return next((columns for keys, columns in _TRACES if all(key in value for key in keys)), None)


def read_lengths(row: Row, quality: ReadQuality) -> Iterator[LoggedRequest]:
    """Requests with counts and times, and no prompt."""
    value = mapping_of(row.value, "row")
    columns = _columns_of(value)
    if columns is None:
        requests = _copilot_session(row, value)
    else:
        requests = [columns.request(row, value, has_full_text=False)]
        if requests[0].usage.num_input is None:
            raise BadRowError(f"row has no {columns.num_input}")
    quality.notes[LENGTHS_ONLY] += len(requests)
    yield from requests


def _copilot_session(row: Row, session: Mapping[str, Any]) -> list[LoggedRequest]:
    requests: list[LoggedRequest] = []
    for turn in list_of(session.get("turns"), "turns"):
        for item in list_of(mapping_of(turn, "turn").get("llm_calls", []), "llm_calls"):
            call = mapping_of(item, "call")
            requests.append(
                COPILOT.request(
                    row,
                    call,
                    index=len(requests),
                    conversation=get_name(session, "session_id"),
                    has_full_text=False,
                    usage=COPILOT.usage(mapping_of(call.get("tokens"), "tokens")),
                )
            )
    return requests


LENGTHS = LogFormat("lengths", is_lengths, partial(RowByRow, read_lengths))
