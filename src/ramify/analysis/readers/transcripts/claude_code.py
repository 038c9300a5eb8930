"""Transcripts of Claude Code: a file a session, a line for each content block of a response.

Read as well is what `claude --output-format stream-json` prints: the same lines, without parents.

The system prompt, the tools and what is injected into messages are not in the transcript. A prompt is
the history of messages as far as it is known, so that no prompt has its full text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ramify.analysis.reader import BadRowError, LogFormat, ReadQuality, Row
from ramify.analysis.readers.bodies.body_fields import ANTHROPIC
from ramify.analysis.readers.bodies.responses import parse_response
from ramify.analysis.readers.bodies.segments import setting, shift_messages
from ramify.analysis.readers.bodies.usage import count
from ramify.analysis.readers.row_values import get_text, get_time, mapping_of
from ramify.analysis.readers.transcripts.claude_tree import Response, TranscriptLine, TranscriptTree
from ramify.analysis.records import LoggedRequest, Segment

SYNTHETIC = "<synthetic>"  # model of messages that the program wrote itself
HISTORY_ONLY = "transcripts have neither system prompt nor tools: only usage covers them"
OTHER_TYPES = frozenset(
    """summary file-history-snapshot queue-operation custom-title ai-title agent-name last-prompt mode
    permission-mode progress attachment system pr-link tag cost-state""".split()
)
_MARKS = ("sessionId", "leafUuid", "snapshot", "parentUuid", "messageId")


def is_claude_code(value: Any) -> bool:
    """Whether a row is a line of a transcript."""
    if not isinstance(value, Mapping):
        return False
    if "parentUuid" in value and ("sessionId" in value or "uuid" in value):
        return True
    if _is_printed(value):
        return True
    kind = value.get("type")
    return isinstance(kind, str) and kind in OTHER_TYPES and any(mark in value for mark in _MARKS)


def _is_printed(value: Mapping[str, Any]) -> bool:
    return (
        value.get("type") in ("system", "user", "assistant", "result", "stream_event")
        and isinstance(value.get("session_id"), str)
        and "parentUuid" not in value
        and any(name in value for name in ("parent_tool_use_id", "subtype", "uuid"))
    )


class ClaudeCodeReader:
    """Reads lines; a response is a request, named by the first of its lines."""

    def __init__(self, quality: ReadQuality) -> None:
        self._quality = quality
        self._file: str | None = None
        self._tree = TranscriptTree()
        self._open: dict[tuple[str, str], Response] = {}  # of this file, in order
        self._last_of: dict[str, Response] = {}  # response whose line has this uuid, still open
        self._last_printed: dict[tuple[str | None, str | None], str] = {}
        self._keys: set[tuple[str, str]] = set()  # in all files: a resumed session copies lines

    def feed(self, row: Row) -> Iterator[LoggedRequest]:
        """See `RowReader`."""
        value = mapping_of(row.value, "row")
        if row.file != self._file:
            yield from self.close()
            self._file, self._tree = row.file, TranscriptTree()
            self._last_printed = {}
        if _is_printed(value):
            value = self._linked(value)
        kind = get_text(value, "type")
        if kind not in ("user", "assistant"):
            if kind == "system" and value.get("subtype") == "compact_boundary":
                self._quality.notes["compaction"] += 1
            self._quality.skipped[f"line of type {kind}"] += 1
            uuid = get_text(value, "uuid")
            if uuid is not None:
                parent = get_text(value, "parentUuid")
                self._tree.add(TranscriptLine(row.line, uuid, parent, get_time(value, "timestamp")))
            return
        message = mapping_of(value.get("message"), "message")
        if kind == "user":
            line = _user_line(row, value, message)
            self._tree.add(line)
            ended = self._last_of.get(line.parent or "")
            # What follows a response ends it, unless its tools run while it still streams.
            if ended is not None and not line.answers:
                yield from self._close(ended)
            return
        yield from self._assistant(row, value, message)

    def close(self) -> Iterator[LoggedRequest]:
        """See `RowReader`."""
        for response in list(self._open.values()):
            yield from self._close(response)

    def _linked(self, value: Mapping[str, Any]) -> Mapping[str, Any]:
        """A printed line as a transcript has it: below the line that was printed before it."""
        agent = get_text(value, "parent_tool_use_id")
        thread = (get_text(value, "session_id"), agent)
        uuid = get_text(value, "uuid")
        line = dict(value) | {
            "parentUuid": self._last_printed.get(thread),
            "sessionId": thread[0],
            "requestId": get_text(value, "request_id"),
            "isSidechain": agent is not None,
            "agentId": agent,
        }
        if uuid is not None and value.get("type") in ("user", "assistant"):
            self._last_printed[thread] = uuid
        return line

    def _assistant(
        self, row: Row, value: Mapping[str, Any], message: Mapping[str, Any]
    ) -> Iterator[LoggedRequest]:
        uuid, parent = get_text(value, "uuid"), get_text(value, "parentUuid")
        if uuid is None:
            raise BadRowError("line of an assistant has no uuid")
        content = message.get("content")
        blocks = content if isinstance(content, list) else [content]
        time = get_time(value, "timestamp")
        if value.get("isApiErrorMessage") or message.get("model") == SYNTHETIC:
            self._quality.skipped["failed attempt"] += 1
            self._tree.add(TranscriptLine(row.line, uuid, parent, time))
            return
        key = (get_text(message, "id") or uuid, get_text(value, "requestId") or "")
        response = self._open.get(key)
        if response is None:
            response = Response(key, row.line, row.index)
            response.info = {name: item for name, item in value.items() if name != "message"}
        line = TranscriptLine(row.line, uuid, parent, time, response=response)
        if response.first is None:
            history = self._tree.history(line)
            if history.parent is not None:
                yield from self._close(history.parent)
            response.first, response.prompt = line, history
            if key in self._keys:
                self._quality.skipped["response that an earlier file has"] += 1
                response.is_copy = True
            self._keys.add(key)
            self._open[key] = response
        self._tree.add(line)
        self._last_of[uuid] = response
        response.blocks += [block for block in blocks if block is not None]
        for block in blocks:
            if isinstance(block, Mapping) and isinstance(block.get("id"), str):
                response.calls.setdefault(block["id"], None)
        response.end_s = time if time is not None else response.end_s
        if _num_output(message) >= _num_output(response.message):
            response.message = response.message | dict(message)

    def _close(self, response: Response) -> Iterator[LoggedRequest]:
        if self._open.pop(response.key, None) is None:
            return
        for uuid in [uuid for uuid, item in self._last_of.items() if item is response]:
            del self._last_of[uuid]
        if not response.is_copy and self._file is not None:
            yield self._request(self._file, response)

    def _request(self, file: str, response: Response) -> LoggedRequest:
        assert response.first is not None
        assert response.prompt is not None
        message = response.message | {"content": response.blocks, "type": "message"}
        answer = parse_response(message)
        usage = answer.usage
        if message.get("stop_reason") is None:
            # Without its end, a response has the count of when it began.
            usage = replace(usage, num_output=None)
        history, info = response.prompt, response.info
        settings: list[Segment] = []
        if answer.model is not None:
            settings.append(setting("model", answer.model))
        if isinstance(info.get("effort"), str):
            settings.append(setting("output_config", {"effort": info["effort"]}))
        self._quality.notes[HISTORY_ONLY] += 1
        start = history.start_s
        return LoggedRequest(
            file=file,
            line=response.line,
            index=response.index,
            segments=(*settings, *history.flat()),
            output=shift_messages(answer.output, history.num_messages),
            request_id=response.key[0],
            conversation=self._conversation(response),
            parent_id=None if history.parent is None else history.parent.key[0],
            start_s=response.first.time_s if start is None else start,
            end_s=response.end_s,
            api=ANTHROPIC,
            provider="anthropic",
            model=answer.model,
            response_model=answer.model,
            has_full_text=False,
            usage=usage,
            verdict=answer.verdict,
        )

    def _conversation(self, response: Response) -> str | None:
        """The session; a sub-agent's conversation is a part of it."""
        session = response.info.get("sessionId")
        session = session if isinstance(session, str) else None
        if response.info.get("isSidechain") is not True or response.first is None:
            return session
        agent = response.info.get("agentId")
        name = agent if isinstance(agent, str) else self._tree.root(response.first).uuid
        return f"{session}/{name}"


def _user_line(row: Row, value: Mapping[str, Any], message: Mapping[str, Any]) -> TranscriptLine:
    uuid = get_text(value, "uuid")
    if uuid is None:
        raise BadRowError("line of a user has no uuid")
    content = message.get("content")
    blocks = tuple(content) if isinstance(content, list) else (content,)
    if not all(isinstance(block, str | Mapping) for block in blocks):
        raise BadRowError("content of a user is neither text nor a list of blocks")
    is_hidden = value.get("isVisibleInTranscriptOnly") is True
    is_sent = not is_hidden or value.get("isCompactSummary") is True
    answers = frozenset(
        block["tool_use_id"]
        for block in blocks
        if isinstance(block, Mapping)
        and block.get("type") == "tool_result"
        and isinstance(block.get("tool_use_id"), str)
    )
    return TranscriptLine(
        row.line,
        uuid,
        get_text(value, "parentUuid"),
        get_time(value, "timestamp"),
        blocks if is_sent else (),
        answers,
    )


def _num_output(message: Mapping[str, Any]) -> int:
    usage = message.get("usage")
    number = count(usage.get("output_tokens")) if isinstance(usage, Mapping) else None
    return -1 if number is None else number


CLAUDE_CODE = LogFormat("claude-code", is_claude_code, ClaudeCodeReader)
