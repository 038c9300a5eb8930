"""Histories that a vendor stores: prompts joined from earlier requests and answers of a log."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

from ramify.analysis.reader import ReadQuality
from ramify.analysis.readers.bodies.body_fields import RESPONSES, is_cut
from ramify.analysis.readers.bodies.segments import num_messages, shift_messages
from ramify.analysis.records import LoggedRequest, Segment, SegmentKind

MAX_CHARS = 1 << 26  # of texts that are kept to be joined; segments of a history are shared


@dataclass(frozen=True, slots=True)
class _Turn:
    messages: tuple[Segment, ...]  # of prompt and answer
    num_messages: int
    is_full: bool
    num_chars: int  # that no earlier turn holds


class ResponseHistory:
    """Puts the messages of earlier turns before requests that name a response or conversation.

    The messages of a turn continue the numbers of its history: after a history of 4 messages,
    `input[0]` is `messages[4]`. `instructions` are not inherited. The turns used last are kept, up
    to a number of characters.
    """

    def __init__(self, quality: ReadQuality, *, max_chars: int = MAX_CHARS) -> None:
        self._quality, self._max_chars = quality, max_chars
        self._turns: OrderedDict[str, _Turn] = OrderedDict()
        self._num_chars = 0

    def completed(self, request: LoggedRequest) -> LoggedRequest:
        """The request with its history; unchanged, and with a note, if the log does not have it."""
        if request.api != RESPONSES:
            return request
        turn = None
        if request.history_id is not None:
            turn = self._turns.get(request.history_id)
            if turn is None:
                self._quality.notes["history is not in the log"] += 1
            else:
                self._turns.move_to_end(request.history_id)
                request = _joined(request, turn)
                self._quality.notes["history joined"] += 1
        self._remember(request, turn)
        return request

    def _remember(self, request: LoggedRequest, history: _Turn | None) -> None:
        names = [request.request_id]
        if request.history_id is not None and request.history_id == request.conversation:
            names.append(request.conversation)
        if not any(names) or not request.output:
            return
        messages = (
            *(item for item in request.segments if item.kind is SegmentKind.MESSAGE),
            *request.output,
        )
        num_chars = sum(len(item.text) for item in messages)
        turn = _Turn(
            messages=messages,
            num_messages=num_messages(messages),
            is_full=request.has_full_text,
            num_chars=num_chars - (0 if history is None else _length(history)),
        )
        for name in names:
            if name is not None:
                replaced = self._turns.pop(name, None)
                self._num_chars += turn.num_chars - (replaced.num_chars if replaced else 0)
                self._turns[name] = turn
        while self._num_chars > self._max_chars and len(self._turns) > 1:
            _, dropped = self._turns.popitem(last=False)
            self._num_chars -= dropped.num_chars


def _length(turn: _Turn) -> int:
    return sum(len(item.text) for item in turn.messages)


def _joined(request: LoggedRequest, turn: _Turn) -> LoggedRequest:
    before = tuple(item for item in request.segments if item.kind is not SegmentKind.MESSAGE)
    new = tuple(item for item in request.segments if item.kind is SegmentKind.MESSAGE)
    is_template = any(item.path == "prompt" for item in before)
    return replace(
        request,
        segments=before + turn.messages + shift_messages(new, turn.num_messages),
        output=shift_messages(request.output, turn.num_messages),
        parent_id=request.parent_id or request.history_id,
        has_full_text=turn.is_full and not is_template and not is_cut(new),
    )
