"""Traces that have lengths only: BurstGPT, Azure LLM inference, sessions of Copilot's coding agent.

Their requests have neither text nor hashes, so that nothing can be said about what they share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ramify.analysis.reader import BadRowError, LogFormat, ReadQuality, Row
from ramify.analysis.readers.bodies.usage import count
from ramify.analysis.readers.row_values import (
    RowByRow,
    get_milliseconds,
    get_name,
    get_time,
    list_of,
    mapping_of,
    quoted,
)
from ramify.analysis.readers.times import later, parse_time
from ramify.analysis.records import LoggedRequest, Usage

LENGTHS_ONLY = "lengths only: neither text nor hashes, so what requests share is unknown"
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURST_GPT = ("Timestamp", "Model", "Request tokens", "Response tokens")
MOONCAKE = ("input_length", "output_length")


def is_lengths(value: Any) -> bool:
    """Whether a row has the columns of a trace of lengths, or is a session with counts of calls."""
    if not isinstance(value, Mapping):
        return False
    if all(name in value for name in AZURE) or all(name in value for name in BURST_GPT):
        return True
    if all(name in value for name in MOONCAKE):
        return "hash_ids" not in value and "messages" not in value and "text_input" not in value
    turns = value.get("turns")
    return (
        "session_id" in value
        and isinstance(turns, list)
        and any(isinstance(turn, Mapping) and "llm_calls" in turn for turn in turns)
    )


def read_lengths(row: Row, quality: ReadQuality) -> Iterator[LoggedRequest]:
    """Requests with counts and times, and no prompt."""
    value = mapping_of(row.value, "row")
    if "turns" in value:
        yield from _copilot_session(row, value, quality)
        return
    if AZURE[1] in value:
        start, num_input, num_output = _time(value, AZURE[0]), value[AZURE[1]], value.get(AZURE[2])
        conversation = model = None
    elif BURST_GPT[2] in value:
        start, num_input = _time(value, BURST_GPT[0]), value[BURST_GPT[2]]
        num_output, model = value.get(BURST_GPT[3]), value.get("Model")
        conversation = get_name(value, "Session ID")
    else:
        start = get_milliseconds(value, "timestamp")
        num_input, num_output = value.get(MOONCAKE[0]), value.get(MOONCAKE[1])
        conversation, model = get_name(value, "session_id"), value.get("model")
    num_tokens = count(num_input)
    if num_tokens is None:
        raise BadRowError(f"number of input tokens is {quoted(num_input)}, not a count")
    quality.notes[LENGTHS_ONLY] += 1
    yield LoggedRequest(
        *row.place,
        conversation=conversation or None,
        start_s=start,
        model=model if isinstance(model, str) else None,
        has_full_text=False,
        usage=Usage(num_input=num_tokens, num_output=count(num_output)),
    )


def _copilot_session(
    row: Row, session: Mapping[str, Any], quality: ReadQuality
) -> Iterator[LoggedRequest]:
    requests: list[LoggedRequest] = []
    for turn in list_of(session["turns"], "turns"):
        for item in list_of(mapping_of(turn, "turn").get("llm_calls", []), "llm_calls"):
            call = mapping_of(item, "call")
            tokens = mapping_of(call.get("tokens"), "tokens")
            start = get_time(call, "timestamp")
            requests.append(
                LoggedRequest(
                    file=row.file,
                    line=row.line,
                    index=len(requests),
                    conversation=get_name(session, "session_id"),
                    start_s=start,
                    end_s=later(start, get_milliseconds(call, "duration_ms")),
                    model=get_name(call, "model"),
                    has_full_text=False,
                    usage=Usage(
                        num_input=count(tokens.get("prompt")),
                        num_read=count(tokens.get("cached")),
                        num_output=count(tokens.get("completion")),
                    ),
                )
            )
    quality.notes[LENGTHS_ONLY] += len(requests)
    yield from requests


def _time(value: Mapping[str, Any], name: str) -> float | None:
    time = parse_time(value[name])
    if time is None:
        raise BadRowError(f"{name} is {quoted(value[name])}, not a time")
    return time


LENGTHS = LogFormat("lengths", is_lengths, partial(RowByRow, read_lengths))
