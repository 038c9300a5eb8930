"""Timelines of the conversations that lose most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from ramify.analysis.corpus import Corpus, StoredRequest
from ramify.analysis.providers.prompts import Prediction
from ramify.analysis.records import SegmentKind
from ramify.analysis.report.document import Session, TimelineRequest
from ramify.analysis.verdicts import CauseName, Verdict

MAX_SESSIONS = 8
MAX_REQUESTS = 40


def session_timelines(
    corpus: Corpus, verdicts: Sequence[Verdict], predictions: Mapping[int, Prediction]
) -> tuple[Session, ...]:
    """The conversations of several requests that lose most; without any, the log's first requests."""
    groups: dict[str | int | None, list[StoredRequest]] = defaultdict(list)
    ordered = sorted(corpus, key=StoredRequest.start_key)
    for request in ordered:
        groups[_conversation(corpus, request)].append(request)
    groups.pop(None, None)
    several = {key: requests for key, requests in groups.items() if len(requests) > 1}
    lost = {
        key: sum(verdicts[request.number].tokens.lost for request in requests)
        for key, requests in several.items()
    }
    most = sorted(several, key=lambda key: (-lost[key], -len(several[key])))[:MAX_SESSIONS]
    sessions = []
    for number, key in enumerate(most, 1):
        name = key if isinstance(key, str) else f"inferred {number}"
        rows = _rows(several[key], verdicts, predictions)
        is_inferred = not isinstance(key, str)
        sessions.append(Session(name, is_inferred, len(several[key]), lost[key], rows))
    if ordered and not sessions:
        total = sum(verdict.tokens.lost for verdict in verdicts)
        rows = _rows(ordered, verdicts, predictions)
        sessions = [Session("all requests", True, len(ordered), total, rows)]
    return tuple(sessions)


def _conversation(corpus: Corpus, request: StoredRequest) -> str | int | None:
    """The logged id, or the unit of the first user message."""
    if request.info.conversation is not None:
        return request.info.conversation
    for unit in request.units.tolist():
        stored = corpus.units[unit]
        if stored.kind is SegmentKind.MESSAGE and stored.label.startswith("user"):
            return int(unit)
    return None


def _rows(
    requests: Sequence[StoredRequest],
    verdicts: Sequence[Verdict],
    predictions: Mapping[int, Prediction],
) -> tuple[TimelineRequest, ...]:
    """The first requests of a session."""
    rows = []
    last_s: float | None = None
    for request in requests[:MAX_REQUESTS]:
        info, usage = request.info, request.info.usage
        verdict, billed = verdicts[request.number], predictions[request.number].billed
        counts: tuple[int, int, int | None, str] = (
            billed.num_input,
            billed.num_read,
            billed.num_written,
            "rule",
        )
        if usage.num_read is not None and usage.num_input is not None:
            counts = (usage.num_input, usage.num_read, usage.num_written, "usage")
        causes = [str(item.cause) for item in verdict.causes]
        place = verdict.divergence
        rows.append(
            TimelineRequest(
                info.file,
                info.line,
                info.start_s,
                None if info.start_s is None or last_s is None else max(0.0, info.start_s - last_s),
                *counts,
                verdict.tokens.lost,
                tuple(cause for cause in causes if cause != CauseName.NEW_CONTENT),
                *(("", "", "") if place is None else (place.segment, place.had, place.got)),
            )
        )
        last_s = info.start_s
    return tuple(rows)
