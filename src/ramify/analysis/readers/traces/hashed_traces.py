"""Traces of hashed blocks: Mooncake and variants, Qwen-Bailian, sessions of Weka (cc-traces).

Mooncake has times in ms and blocks of 512 tokens; variants add sessions with delays (AIPerf), prompts as
text or messages, a block size, and dependencies between requests with a header row (Dynamo's agentic
Mooncake). Bailian has times in seconds, blocks of 16 tokens, and turns linked by chat ids. Weka has a
session of a coding agent in each row, and ids that are valid inside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ramify.analysis.reader import BadRowError, LogFormat, ReadQuality, Row, RowReader
from ramify.analysis.readers.bodies.request_bodies import parse_bodies
from ramify.analysis.readers.row_values import (
    RowByRow,
    get_name,
    get_number,
    get_text,
    list_of,
    mapping_of,
    quoted,
)
from ramify.analysis.readers.times import later
from ramify.analysis.readers.traces import trace_columns
from ramify.analysis.readers.traces.hashed_prompts import (
    BlockSizes,
    FileScopes,
    block_ids_of,
    check_block_size,
    hashed_prompt,
    namespaced,
)
from ramify.analysis.records import HashedPrompt, LoggedRequest, Segment, SegmentKind

MOONCAKE_BLOCK, BAILIAN_BLOCK, WEKA_BLOCK = 512, 16, 64  # tokens, where no row says it
AGENTIC_SCHEMA = "dynamo.agentic_mooncake"
OTHER_FORMATS = ("chat_id", "page_size", "requests")
ESTIMATED_START = "start estimated as that of the previous turn + delay"
BAILIAN_ROOT = "-1"  # parent of a first turn
SUBAGENT = "subagent"
OVERLAID = "times count from the start of each session: sessions are laid over each other"


def is_mooncake(value: Any) -> bool:
    """Whether a row has `hash_ids` or `text_input` and nothing that marks another trace."""
    if not isinstance(value, Mapping):
        return False
    if value.get("schema") == AGENTIC_SCHEMA:
        return True
    has_prompt = (
        isinstance(value.get("hash_ids"), list)
        or isinstance(value.get("text_input"), str)
        or (isinstance(value.get("messages"), list) and "output_length" in value)
    )
    return has_prompt and not any(name in value for name in OTHER_FORMATS)


class MooncakeReader(RowReader):
    """Reads rows; a row without a time starts `delay` ms after the previous row of its session."""

    def __init__(self, quality: ReadQuality) -> None:
        self._quality = quality
        self._sizes = BlockSizes(MOONCAKE_BLOCK, quality)
        self._scopes = FileScopes(quality)
        self._starts: dict[tuple[str, str], float] = {}  # of the last row, by file and session
        self._header_sizes: dict[str, int] = {}

    def feed(self, row: Row) -> Iterator[LoggedRequest]:
        """See `RowReader`."""
        value = mapping_of(row.value, "row")
        if value.get("schema") == AGENTIC_SCHEMA:
            self._header_sizes[row.file] = check_block_size(value.get("block_size"))
            self._quality.skipped["header"] += 1
            return
        fields: dict[str, Any] = {}
        if get_text(value, "text_input") is not None:
            fields["segments"] = (Segment("prompt", SegmentKind.MESSAGE, value["text_input"]),)
        elif value.get("hash_ids") is not None:
            fields["hashed"] = self._hashed(row.file, value)
            fields["cache_scope"] = self._scopes.scope(row.file)
        elif value.get("messages") is not None:
            fields["segments"] = parse_bodies(value)[0].segments
        else:
            raise BadRowError("row has no hash_ids, text_input or messages")
        yield trace_columns.MOONCAKE.request(
            row, value, start_s=self._start_s(row.file, value), **fields
        )

    def _hashed(self, file: str, value: Mapping[str, Any]) -> HashedPrompt:
        ids = block_ids_of(value["hash_ids"])
        size = value.get("block_size", self._header_sizes.get(file))
        if file in self._header_sizes:  # the schema says that ids are valid in a play
            ids = namespaced(ids, get_name(value, "play_id") or "")
        return self._sizes.prompt(file, ids, trace_columns.MOONCAKE.usage(value).num_input, size)

    def _start_s(self, file: str, value: Mapping[str, Any]) -> float | None:
        start_s, session = trace_columns.MOONCAKE.start_s(value), get_name(value, "session_id")
        if session is None:
            return start_s
        if start_s is None:
            delay_s = trace_columns.MOONCAKE.seconds(value, "delay, delay_ms")
            start_s = later(self._starts.get((file, session)), delay_s)
            if start_s is None:
                return None
            self._quality.notes[ESTIMATED_START] += 1
        self._starts[file, session] = start_s
        return start_s


def is_bailian(value: Any) -> bool:
    """Whether a row has the ids of a chat and of its blocks."""
    return isinstance(value, Mapping) and "chat_id" in value and "hash_ids" in value


class BailianReader(RowReader):
    """Reads rows; a conversation is named by the chat id of its first turn."""

    def __init__(self, quality: ReadQuality) -> None:
        self._sizes = BlockSizes(BAILIAN_BLOCK, quality)
        self._scopes = FileScopes(quality)
        self._roots: dict[str, str] = {}  # first turn of each chat that is no first turn

    def feed(self, row: Row) -> Iterator[LoggedRequest]:
        """See `RowReader`."""
        value = mapping_of(row.value, "row")
        request = trace_columns.BAILIAN.request(row, value)
        chat, parent = request.request_id, get_name(value, "parent_chat_id")
        if chat is None:
            raise BadRowError("row has no chat_id")
        ids, size = block_ids_of(value.get("hash_ids")), value.get("block_size")
        conversation = chat
        if parent is not None and parent != BAILIAN_ROOT:
            conversation = self._roots[chat] = self._roots.get(parent, parent)
        yield replace(
            request,
            hashed=self._sizes.prompt(row.file, ids, request.usage.num_input, size),
            conversation=conversation,
            parent_id=None if parent == BAILIAN_ROOT else parent,
            cache_scope=self._scopes.scope(row.file),
        )


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
    size = WEKA_BLOCK if size is None else check_block_size(size)
    namespace = f"{row.file} {row.line} {row.index} {name}" if scope == "local" else None
    requests: list[LoggedRequest] = []
    for value, agent, offset_s in _weka_calls(list_of(session.get("requests"), "requests")):
        ids = block_ids_of(value.get("hash_ids", []))
        if namespace is not None:
            ids = namespaced(ids, namespace)
        num_tokens = trace_columns.WEKA.usage(value).num_input
        if num_tokens is None:
            raise BadRowError("request has no `in`, the number of its input tokens")
        start_s = trace_columns.WEKA.start_s(value)
        requests.append(
            trace_columns.WEKA.request(
                row,
                value,
                index=len(requests),
                hashed=hashed_prompt(size, ids, num_tokens),
                conversation=name if agent is None else f"{name}/{agent}",
                start_s=None if start_s is None else start_s + offset_s,
            )
        )
    if any(request.start_s is not None for request in requests):
        quality.notes[OVERLAID] += 1
    yield from requests


def _weka_calls(requests: list[Any]) -> Iterator[tuple[Mapping[str, Any], str | None, float]]:
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


MOONCAKE = LogFormat("mooncake", is_mooncake, MooncakeReader)
BAILIAN = LogFormat("bailian", is_bailian, BailianReader)
WEKA = LogFormat("weka", is_weka, partial(RowByRow, read_weka))
