"""Sessions of coding agents as hashed blocks (Weka, cc-traces): a session a row, ids valid inside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ramify.analysis.reader import BadRowError, LogFormat, ReadQuality, Row
from ramify.analysis.readers.row_values import (
    RowByRow,
    get_first_count,
    get_name,
    get_number,
    get_text,
    list_of,
    mapping_of,
    quoted,
)
from ramify.analysis.readers.times import later
from ramify.analysis.readers.traces.hashed_prompts import (
    block_ids_of,
    check_block_size,
    namespaced,
    num_blocks,
)
from ramify.analysis.records import HashedPrompt, LoggedRequest, Usage

BLOCK_SIZE = 64
SUBAGENT = "subagent"
OVERLAID = "times count from the start of each session: sessions are laid over each other"


def is_weka(value: Any) -> bool:
    """Whether a row is a session with a list of hashed requests."""
    if not isinstance(value, Mapping) or not isinstance(value.get("requests"), list):
        return False
    return (
        "hash_id_scope" in value
        or "block_size" in value
        or any(isinstance(item, Mapping) and "hash_ids" in item for item in value["requests"][:2])
    )


def read_weka(row: Row, quality: ReadQuality) -> Iterator[LoggedRequest]:
    """The requests of a session in the order of the row, those of subagents where they are nested.

    Ids with the scope `local` are valid in the session and its subagents only.
    """
    session = mapping_of(row.value, "row")
    name = get_name(session, "id") or get_name(session, "trace_id")
    scope = get_text(session, "hash_id_scope") or "local"
    if scope not in ("local", "global"):
        raise BadRowError(f"hash_id_scope is {quoted(scope)}; local and global are known")
    size = session.get("block_size")
    size = BLOCK_SIZE if size is None else check_block_size(size)
    namespace = f"{row.file} {row.line} {row.index} {name}" if scope == "local" else None
    requests: list[LoggedRequest] = []
    for value, agent, offset_s in _calls(list_of(session.get("requests"), "requests")):
        ids = block_ids_of(value.get("hash_ids", []))
        if namespace is not None:
            ids = namespaced(ids, namespace)
        num_tokens = get_first_count(value, "in", "input_length")
        if num_tokens is None:
            raise BadRowError("request has no `in`, the number of its input tokens")
        start = get_number(value, "t")
        start = None if start is None else start + offset_s
        requests.append(
            LoggedRequest(
                file=row.file,
                line=row.line,
                index=len(requests),
                hashed=HashedPrompt(size, ids[: num_blocks(num_tokens, size)], num_tokens),
                conversation=name if agent is None else f"{name}/{agent}",
                start_s=start,
                first_output_s=later(start, get_number(value, "ttft")),
                end_s=later(start, get_number(value, "api_time")),
                model=get_text(value, "model"),
                usage=Usage(
                    num_input=num_tokens, num_output=get_first_count(value, "out", "output_length")
                ),
            )
        )
    if any(request.start_s is not None for request in requests):
        quality.notes[OVERLAID] += 1
    yield from requests


def _calls(requests: list[Any]) -> Iterator[tuple[Mapping[str, Any], str | None, float]]:
    """Calls with the subagent that made them, and what is to be added to their times."""
    for item in requests:
        value = mapping_of(item, "request")
        if value.get("type") != SUBAGENT:
            yield value, None, 0.0
            continue
        agent = get_name(value, "agent_id") or SUBAGENT
        inner = [mapping_of(call, "request") for call in list_of(value.get("requests"), "requests")]
        spawned, first = get_number(value, "t"), get_number(inner[0], "t") if inner else None
        # Some traces count a subagent's times from its own start.
        is_relative = spawned is not None and first is not None and first < spawned
        for call in inner:
            yield call, agent, spawned if is_relative and spawned is not None else 0.0


WEKA = LogFormat("weka", is_weka, partial(RowByRow, read_weka))
