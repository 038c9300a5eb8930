"""Traces of hashed blocks: Mooncake and variants, Qwen-Bailian, sessions of Weka (cc-traces).

Mooncake has times in ms and blocks of 512 tokens; variants add sessions with delays (AIPerf), prompts as
text or messages, a block size, and dependencies between requests with a header row (Dynamo's agentic
Mooncake). Bailian has times in seconds, blocks of 16 tokens, and turns linked by chat ids. Weka has a
session of a coding agent in each row, and ids that are valid inside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ramify.analysis.reader import BadRowError, LogFormat, ReadQuality, Row, RowReader
from ramify.analysis.readers.bodies.request_bodies import parse_bodies
from ramify.analysis.readers.row_values import (
    RowByRow,
    get_count,
    get_first_count,
    get_milliseconds,
    get_name,
    get_number,
    get_text,
    list_of,
    mapping_of,
    quoted,
)
from ramify.analysis.readers.times import later
from ramify.analysis.readers.traces.hashed_prompts import (
    BlockSizes,
    FileScopes,
    block_ids_of,
    check_block_size,
    namespaced,
    num_blocks,
)
from ramify.analysis.records import HashedPrompt, LoggedRequest, Segment, SegmentKind, Usage

MOONCAKE_BLOCK, BAILIAN_BLOCK, WEKA_BLOCK = 512, 16, 64  # tokens, where no row says it
AGENTIC_SCHEMA = "dynamo.agentic_mooncake"
OTHER_FORMATS = ("chat_id", "page_size", "requests")
_START_NAMES = ("timestamp", "created_time", "not_before_ms")
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
        session = get_name(value, "session_id")
        text = get_text(value, "text_input")
        num_tokens = get_first_count(value, "input_length", "input_tokens")
        segments: tuple[Segment, ...] = ()
        hashed: HashedPrompt | None = None
        if text is not None:
            segments = (Segment("prompt", SegmentKind.MESSAGE, text),)
        elif value.get("hash_ids") is not None:
            hashed = self._hashed(row.file, value, num_tokens)
        elif value.get("messages") is not None:
            segments = parse_bodies(value)[0].segments
        else:
            raise BadRowError("row has no hash_ids, text_input or messages")
        start = self._start_s(row.file, session, value)
        yield LoggedRequest(
            *row.place,
            segments=segments,
            hashed=hashed,
            request_id=get_name(value, "request_id"),
            conversation=session,
            start_s=start,
            end_s=later(start, get_milliseconds(value, "recorded_api_time_ms")),
            model=get_text(value, "model"),
            cache_scope="" if hashed is None else self._scopes.scope(row.file),
            usage=Usage(
                num_input=num_tokens,
                num_output=get_first_count(value, "output_length", "output_tokens"),
            ),
        )

    def _hashed(self, file: str, value: Mapping[str, Any], num_tokens: int | None) -> HashedPrompt:
        ids = block_ids_of(value["hash_ids"])
        size = value.get("block_size", self._header_sizes.get(file))
        if file in self._header_sizes:  # the schema says that ids are valid in a play
            ids = namespaced(ids, get_name(value, "play_id") or "")
        return self._sizes.prompt(file, ids, num_tokens, size)

    def _start_s(self, file: str, session: str | None, value: Mapping[str, Any]) -> float | None:
        times = (get_milliseconds(value, name) for name in _START_NAMES)
        start = next((time for time in times if time is not None), None)
        if session is None:
            return start
        if start is None and (file, session) in self._starts:
            delay = get_milliseconds(value, "delay" if "delay" in value else "delay_ms")
            if delay is not None:
                start = self._starts[file, session] + delay
                self._quality.notes[ESTIMATED_START] += 1
        if start is not None:
            self._starts[file, session] = start
        return start


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
        chat = get_name(value, "chat_id")
        if chat is None:
            raise BadRowError("row has no chat_id")
        parent = get_name(value, "parent_chat_id")
        if parent == BAILIAN_ROOT:
            parent = None
        num_tokens = get_count(value, "input_length")
        hashed = self._sizes.prompt(
            row.file, block_ids_of(value.get("hash_ids")), num_tokens, value.get("block_size")
        )
        request = LoggedRequest(
            *row.place,
            hashed=hashed,
            request_id=chat,
            conversation=chat if parent is None else self._roots.get(parent, parent),
            parent_id=parent,
            start_s=get_number(value, "timestamp"),
            cache_scope=self._scopes.scope(row.file),
            usage=Usage(num_input=num_tokens, num_output=get_count(value, "output_length")),
        )
        if request.conversation is not None and parent is not None:
            self._roots[chat] = request.conversation
        yield request


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
