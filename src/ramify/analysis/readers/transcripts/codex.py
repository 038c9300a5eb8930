"""Rollouts of Codex CLI: a file a thread, items of the Responses API and counts of tokens.

Tool schemas are not in the rollout, so that no prompt has its full text. A response ends with a
`token_count` event, or with a `token_usage_record` in newer versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ramify.analysis.reader import LogFormat, ReadQuality, Row, RowReader
from ramify.analysis.readers.bodies.body_fields import RESPONSES
from ramify.analysis.readers.bodies.responses_bodies import input_item
from ramify.analysis.readers.bodies.segments import setting
from ramify.analysis.readers.bodies.usage import count, parse_usage
from ramify.analysis.readers.row_values import get_name, get_text, get_time, list_of, mapping_of
from ramify.analysis.records import LoggedRequest, Segment, SegmentKind

TYPES = frozenset(
    """session_meta turn_context response_item compacted event_msg token_usage_record ghost_snapshot
    world_state inter_agent_communication""".split()
)
OUTPUT_TYPES = tuple(
    """reasoning function_call custom_tool_call local_shell_call web_search_call tool_search_call
    image_generation_call""".split()
)
COUNTERS = tuple(
    "input_tokens cached_input_tokens cache_write_input_tokens output_tokens total_tokens".split()
)
HISTORY_ONLY = "rollouts have no tool schemas: only usage covers them"
SUMMARY_ONLY = "history before a compaction unknown: the rollout has the summary only"


def is_codex(value: Any) -> bool:
    """Whether a row is a line of a rollout."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("payload"), Mapping)
        and isinstance(value.get("type"), str)
        and value["type"] in TYPES
    )


@dataclass(frozen=True, slots=True)
class _Item:
    line: int
    time_s: float | None
    is_output: bool  # written by the model
    is_user: bool  # a message that begins a turn
    segments: tuple[Segment, ...]


@dataclass(slots=True)
class _Thread:
    """What the lines of a file have said so far."""

    thread_id: str | None = None
    provider: str | None = None
    settings: tuple[Segment, ...] = ()
    system: tuple[Segment, ...] = ()
    model: str | None = None
    items: list[_Item] = field(default_factory=list)
    num_counted: int = 0  # items of responses that are requests already
    total: dict[str, int] = field(default_factory=dict)  # of the last token count
    last_usage: dict[str, int] = field(default_factory=dict)  # of the last request
    has_records: bool = False
    first_ordinal: int = 0  # lines before it are another thread's
    last_request: str | None = None
    number: int = 0


class CodexReader(RowReader):
    """Reads lines; a response is a request, named by its first item."""

    def __init__(self, quality: ReadQuality) -> None:
        self._quality = quality
        self._file: str | None = None
        self._thread = _Thread()
        self._response_ids: set[str] = set()  # a forked thread copies lines

    def feed(self, row: Row) -> Iterator[LoggedRequest]:
        """See `RowReader`."""
        value = mapping_of(row.value, "row")
        if row.file != self._file:
            self._file, self._thread = row.file, _Thread()
        kind = get_text(value, "type")
        payload = mapping_of(value.get("payload"), "payload")
        if kind == "session_meta":
            self._meta(payload)
        elif kind == "turn_context":
            self._context(payload)
        elif kind == "response_item":
            self._item(row.line, payload, get_time(value, "timestamp"))
        elif kind == "compacted":
            self._compact(row.line, payload, get_time(value, "timestamp"))
        elif kind == "token_usage_record":
            yield from self._usage_record(row, value, payload)
        elif kind == "event_msg" and payload.get("type") == "token_count":
            yield from self._token_count(row, value, payload)
        elif kind == "event_msg" and payload.get("type") == "thread_rolled_back":
            self._roll_back(count(payload.get("num_turns")) or 0)
        else:
            self._quality.skipped[f"line of type {kind}"] += 1

    def _meta(self, payload: Mapping[str, Any]) -> None:
        thread = self._thread
        if thread.thread_id is not None:  # of the thread that this one was forked from
            return
        thread.thread_id = get_name(payload, "id")
        thread.provider = get_text(payload, "model_provider")
        thread.first_ordinal = count(payload.get("subagent_history_start_ordinal")) or 0
        base = payload.get("base_instructions", payload.get("instructions"))
        text = base.get("text") if isinstance(base, Mapping) else base
        if isinstance(text, str) and text:
            thread.system = (Segment("system", SegmentKind.SYSTEM, text),)

    def _context(self, payload: Mapping[str, Any]) -> None:
        """The settings of the turns that follow."""
        thread = self._thread
        thread.model = get_text(payload, "model")
        settings = [] if thread.model is None else [setting("model", thread.model)]
        reasoning = {
            name: payload[name]
            for name in ("effort", "summary")
            if isinstance(payload.get(name), str)
        }
        if reasoning:
            settings.append(setting("reasoning", reasoning))
        thread.settings = tuple(settings)

    def _item(self, line: int, payload: Mapping[str, Any], time_s: float | None) -> None:
        items = self._thread.items
        role = payload.get("role")
        items.append(
            _Item(
                line,
                time_s,
                is_output=role == "assistant" or payload.get("type") in OUTPUT_TYPES,
                is_user=role == "user",
                segments=tuple(input_item(payload, len(items))),
            )
        )

    def _compact(self, line: int, payload: Mapping[str, Any], time_s: float | None) -> None:
        thread = self._thread
        self._quality.notes["compaction"] += 1
        history = payload.get("replacement_history")
        if history is None:
            self._quality.notes[SUMMARY_ONLY] += 1
            message = get_text(payload, "message") or ""
            content = [{"type": "input_text", "text": message}]
            history = [{"type": "message", "role": "user", "content": content}]
        replacement = [mapping_of(item, "item") for item in list_of(history, "replacement_history")]
        thread.items = []
        for item in replacement:
            self._item(line, item, time_s)
        thread.num_counted = len(thread.items)

    def _roll_back(self, num_turns: int) -> None:
        """Drop the last turns of the user."""
        items = self._thread.items
        begins = [number for number, item in enumerate(items) if item.is_user]
        if 0 < num_turns <= len(begins):
            del items[begins[-num_turns] :]
        elif num_turns:
            items.clear()
        self._thread.num_counted = min(self._thread.num_counted, len(items))

    def _token_count(
        self, row: Row, value: Mapping[str, Any], payload: Mapping[str, Any]
    ) -> Iterator[LoggedRequest]:
        """A response, if the cumulative counts have moved."""
        thread = self._thread
        info = payload.get("info")
        if not isinstance(info, Mapping) or thread.has_records:
            self._quality.skipped["token count without a response"] += 1
            return
        last, total = info.get("last_token_usage"), info.get("total_token_usage")
        counts = _counts(mapping_of(last if total is None else total, "total_token_usage"))
        before, thread.total = thread.total, counts
        if counts == before:
            self._quality.skipped["token count without a response"] += 1
            return
        if last is None:  # older versions have the sum only
            last = {name: max(0, number - before.get(name, 0)) for name, number in counts.items()}
        usage = mapping_of(last, "last_token_usage")
        if not any(_counts(usage).values()):  # a compaction has changed the sum
            self._quality.skipped["token count without a response"] += 1
            return
        yield from self._response(row, value, usage, None)

    def _usage_record(
        self, row: Row, value: Mapping[str, Any], payload: Mapping[str, Any]
    ) -> Iterator[LoggedRequest]:
        thread = self._thread
        usage = mapping_of(payload.get("usage"), "usage")
        response_id = get_text(payload, "response_id")
        is_counted = (
            not thread.has_records
            and thread.number > 0
            and thread.num_counted == len(thread.items)
            and thread.last_usage == _counts(usage)
        )
        thread.has_records = True
        if is_counted or (response_id is not None and response_id in self._response_ids):
            self._quality.skipped["response that an earlier line has"] += 1
            thread.num_counted = len(thread.items)
            return
        if response_id is not None:
            self._response_ids.add(response_id)
        yield from self._response(row, value, usage, response_id)

    def _response(
        self,
        row: Row,
        value: Mapping[str, Any],
        usage: Mapping[str, Any],
        response_id: str | None,
    ) -> Iterator[LoggedRequest]:
        thread = self._thread
        items = thread.items
        begin = _first_output(items, thread.num_counted)
        thread.num_counted = len(items)
        ordinal = count(value.get("ordinal"))
        if ordinal is not None and ordinal < thread.first_ordinal:
            self._quality.skipped["response of the parent thread"] += 1
            return
        self._quality.notes[HISTORY_ONLY] += 1
        prompt, output = items[:begin], [item for item in items[begin:] if item.is_output]
        thread.number += 1
        thread.last_usage = _counts(usage)
        request_id = response_id or f"{thread.thread_id or row.file}#{thread.number}"
        times = [item.time_s for item in prompt if item.time_s is not None]
        yield LoggedRequest(
            file=row.file,
            line=output[0].line if output else row.line,
            segments=(
                *thread.settings,
                *thread.system,
                *(segment for item in prompt for segment in item.segments),
            ),
            output=tuple(segment for item in output for segment in item.segments),
            request_id=request_id,
            conversation=thread.thread_id,
            parent_id=thread.last_request,
            start_s=max(times, default=None),
            end_s=get_time(value, "timestamp"),
            api=RESPONSES,
            provider=thread.provider,
            model=thread.model,
            has_full_text=False,
            usage=parse_usage(usage, dialect="openai"),
        )
        thread.last_request = request_id


def _counts(usage: Mapping[str, Any]) -> dict[str, int]:
    """The counters that are there."""
    numbers = {name: count(usage.get(name)) for name in COUNTERS}
    return {name: number for name, number in numbers.items() if number is not None}


def _first_output(items: list[_Item], begin: int) -> int:
    """Where the last response begins among the items from `begin` on.

    Outputs of tools follow the response that called them, and come before its count if they are fast.
    """
    for number in range(len(items) - 1, begin - 1, -1):
        if items[number].is_output and (number == begin or not items[number - 1].is_output):
            return number
    return len(items)


CODEX = LogFormat("codex", is_codex, CodexReader)
