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
    groups: dict[str | int, list[StoredRequest]] = defaultdict(list)
    ordered = sorted(corpus, key=StoredRequest.start_key)
    for request in ordered:
        key = _conversation(corpus, request)
        if key is not None:
            groups[key].append(request)
    several = [(key, requests) for key, requests in groups.items() if len(requests) > 1]
    if not several:
        session = _session("all requests", ordered, verdicts, predictions, is_inferred=True)
        return (session,) if ordered else ()
    several.sort(key=lambda item: (-_lost(item[1], verdicts), -len(item[1])))
    return tuple(
        _session(
            key if isinstance(key, str) else f"inferred {number}",
            requests,
            verdicts,
            predictions,
            is_inferred=not isinstance(key, str),
        )
        for number, (key, requests) in enumerate(several[:MAX_SESSIONS], 1)
    )


def _conversation(corpus: Corpus, request: StoredRequest) -> str | int | None:
    """The logged id, or the unit of the first user message."""
    if request.info.conversation is not None:
        return request.info.conversation
    for unit in request.units.tolist():
        stored = corpus.units[unit]
        if stored.kind is SegmentKind.MESSAGE and stored.label.startswith("user"):
            return int(unit)
    return None


def _lost(requests: Sequence[StoredRequest], verdicts: Sequence[Verdict]) -> int:
    return sum(verdicts[request.number].tokens.lost for request in requests)


def _session(
    name: str,
    requests: Sequence[StoredRequest],
    verdicts: Sequence[Verdict],
    predictions: Mapping[int, Prediction],
    *,
    is_inferred: bool,
) -> Session:
    rows = []
    last_s: float | None = None
    for request in requests[:MAX_REQUESTS]:
        verdict = verdicts[request.number]
        rows.append(_row(request, verdict, predictions[request.number], last_s))
        last_s = request.info.start_s
    return Session(name, is_inferred, len(requests), _lost(requests, verdicts), tuple(rows))


def _row(
    request: StoredRequest, verdict: Verdict, prediction: Prediction, last_s: float | None
) -> TimelineRequest:
    info, usage, billed = request.info, request.info.usage, prediction.billed
    is_billed = usage.num_read is not None and usage.num_input is not None
    divergence = verdict.divergence
    return TimelineRequest(
        file=info.file,
        line=info.line,
        start_s=info.start_s,
        gap_s=None if info.start_s is None or last_s is None else max(0.0, info.start_s - last_s),
        num_input=(usage.num_input or 0) if is_billed else billed.num_input,
        num_read=(usage.num_read or 0) if is_billed else billed.num_read,
        num_written=usage.num_written if is_billed else billed.num_written,
        source="usage" if is_billed else "rule",
        tokens_lost=verdict.tokens.lost,
        causes=tuple(
            str(cause.cause) for cause in verdict.causes if cause.cause is not CauseName.NEW_CONTENT
        ),
        segment="" if divergence is None else divergence.segment,
        had="" if divergence is None else divergence.had,
        got="" if divergence is None else divergence.got,
    )
