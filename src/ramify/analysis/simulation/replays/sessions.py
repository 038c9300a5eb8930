"""Which requests of a trace are one session, and when each session has its last request."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ramify.analysis.simulation.page_trace import PageTrace

# A prompt that ends with a page of more requests than this is no beginning of a conversation: all may
# have its system prompt.
MAX_USES = 100


def with_sessions(trace: PageTrace) -> tuple[PageTrace, bool]:
    """A trace whose requests have sessions, and whether they are inferred: none was logged."""
    is_logged = bool((trace.session >= 0).any())
    return (trace, False) if is_logged else (replace(trace, session=_inferred(trace)), True)


def _inferred(trace: PageTrace) -> np.ndarray:
    """Sessions by prefix: a request continues the last one whose whole pages its prompt begins with.

    Each request is continued once; a second continuation begins a session of its own.
    """
    uses = np.bincount(trace.page_ids, minlength=trace.num_ids)
    ended: dict[int, int] = {}  # last page of a prompt → session
    sessions, num_sessions = np.full(len(trace), -1, np.int32), 0
    for request in range(len(trace)):
        pages = trace.pages(request)[: trace.num_lookup_pages[request]].tolist()
        last = next((page for page in reversed(pages) if page in ended), None)
        if last is None:
            session, num_sessions = num_sessions, num_sessions + 1
        else:
            session = ended.pop(last)
        sessions[request] = session
        if pages and uses[pages[-1]] <= MAX_USES:
            ended[pages[-1]] = session
    return sessions


def ends_by_time(trace: PageTrace, after_s: float) -> list[tuple[float, int]]:
    """(seconds, session) of each end, `after_s` after the session's last request, in order."""
    last: dict[int, float] = {}
    for session, start_s in zip(trace.session.tolist(), trace.start_s.tolist(), strict=True):
        if session >= 0:
            last[session] = max(start_s, last.get(session, start_s))
    return sorted((start_s + after_s, session) for session, start_s in last.items())
