"""Look-ups: which pages a store beyond a network lists, asked for requests that wait for the answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Final, Generic, TypeVar

from ramify.errors import InvariantError

Waiter = TypeVar("Waiter")

MAX_LOOK_UP_PAGES: Final = 2048  # of one look-up: 32 thousand tokens, 5 ms of the asking thread
# A request waits for an answer no longer than this, and than this share of what computing takes.
MAX_WAIT_S: Final = 0.05
WAIT_SHARE: Final = 0.05
LEAST_WAIT_S: Final = 0.005  # below this a thread that wakes late would seem to be a slow store
# The store may take longer: then the answer is of no use, and tells how slow the store is.
ANSWER_S: Final = 0.5
NUM_SAMPLES: Final = 15
MIN_SAMPLES: Final = 3  # fewer prove nothing


def wait_s(compute_s: float) -> float:
    """How long a request may wait for an answer.

    Args:
        compute_s: that computing the pages in question takes.
    """
    return min(MAX_WAIT_S, max(LEAST_WAIT_S, WAIT_SHARE * compute_s))


class AnswerTimes:
    """Seconds between look-ups and their answers, as a moving median.

    Late answers count too, so a store that has become faster is waited for again.
    """

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=NUM_SAMPLES)

    def add(self, seconds: float) -> None:
        """Count an answer, or the end of the store's time for it."""
        self._samples.append(seconds)

    def is_worth_waiting(self, limit_s: float) -> bool:
        """Whether an answer is likely within `limit_s`."""
        return len(self._samples) < MIN_SAMPLES or median(self._samples) <= limit_s


@dataclass(slots=True)
class _Wait:
    """A request's wait for the answer about its pages from `first` to before `end`."""

    limit_s: float
    first: int
    end: int
    deadline_s: float = inf  # until it could run


class LookUpTable(Generic[Waiter]):
    """What a store answered for each request, and the requests that wait for it.

    A request is asked for once per page and admission: an answer that is late, or lacks a page, is final.
    """

    def __init__(self) -> None:
        self._ends: dict[Waiter, int] = {}  # pages of the prompt that were asked about
        self._listed: dict[Waiter, set[bytes]] = {}
        self._waiting: dict[Waiter, _Wait] = {}

    @property
    def num_waiting(self) -> int:
        """Requests that wait for an answer."""
        return len(self._waiting)

    def is_waiting(self, request: Waiter) -> bool:
        """Whether a request waits for an answer."""
        return request in self._waiting

    def may_ask(self, request: Waiter, page: int) -> bool:
        """Whether the store was not asked about this page of a prompt yet."""
        return page >= self._ends.get(request, 0)

    def begin(self, request: Waiter, first: int, end: int, limit_s: float) -> None:
        """Let a request wait for an answer about its pages from `first` to before `end`.

        Args:
            limit_s: how long, once the request could run.
        """
        self._ends[request] = end
        self._waiting[request] = _Wait(limit_s, first, end)

    def limit_of(self, request: Waiter) -> float | None:
        """How long a request may wait from now on; None: it does not wait, or its time runs already."""
        wait = self._waiting.get(request)
        return None if wait is None or wait.deadline_s < inf else wait.limit_s

    def begin_wait(self, request: Waiter, deadline_s: float) -> None:
        """A request that waits could run: its time runs from now on."""
        self._waiting[request].deadline_s = deadline_s

    def waiting(self) -> list[Waiter]:
        """The requests that wait for an answer."""
        return [*self._waiting]

    def answered(self, request: Waiter, listed: Iterable[bytes]) -> bool:
        """Note which pages the store has; returns whether the request still waited."""
        if request in self._ends:
            self._listed.setdefault(request, set()).update(listed)
        return self._waiting.pop(request, None) is not None

    def take_late(self, now_s: float, requests: Iterable[Waiter]) -> list[tuple[Waiter, int, int]]:
        """Those of these requests whose answer did not come in time, with their pages; they wait no longer."""
        late = []
        for request in requests:
            wait = self._waiting.get(request)
            if wait is not None and now_s >= wait.deadline_s:
                late.append((request, wait.first, wait.end))
                del self._waiting[request]
        return late

    def lists(self, request: Waiter, page_hash: bytes) -> bool:
        """Whether the store answered that it has a page."""
        return page_hash in self._listed.get(request, ())

    def forget(self, request: Waiter) -> None:
        """Forget a request that was admitted or has ended."""
        self._ends.pop(request, None)
        self._listed.pop(request, None)
        self._waiting.pop(request, None)

    def check(self) -> None:
        """Raise InvariantError if a request waits, or has an answer, without a look-up."""
        if not self._ends.keys() >= self._waiting.keys() | self._listed.keys():
            raise InvariantError("a request has the answer to a look-up that was not made")
