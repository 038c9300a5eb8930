"""`SimulatedReplica`: a real `PrefixCache` behind a queue, with the time that computing takes."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field

from ramify.cache import CacheKey, Lease, PrefixCache
from ramify.cluster.decisions import Load
from ramify.errors import OutOfPagesError
from ramify.step_cost import CostModel

EVENT_CAPACITY = 1 << 16
CHUNK_TOKENS = 2048  # of a prompt that a step computes


@dataclass(eq=False, slots=True)
class SimulatedRequest:
    """A request of a trace on its way through a replica. A page is an atom: ids are of prefixes."""

    number: int
    prompt: CacheKey
    answer: CacheKey  # with the pages of the prompt
    num_tokens: int
    num_output: int
    arrival_s: float
    num_hit: int = 0  # tokens
    reservation: int = 0
    lease: Lease | None = None
    private: list[int] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        number: int,
        pages: list[int],
        num_lookup_pages: int,
        num_tokens: int,
        num_output: int,
        arrival_s: float,
    ) -> SimulatedRequest:
        """A request from the pages of its prompt and its answer."""
        answer = CacheKey(array("i", pages))
        return cls(
            number, answer.prefix(num_lookup_pages), answer, num_tokens, num_output, arrival_s
        )


class SimulatedReplica:
    """Computes one prompt after the other, and decodes beside it; owns the cache.

    A prompt takes `token_s` for each token that does not hit. An answer takes `step_s` for each of
    its tokens, and `token_s` for each request that decoded when it began.
    """

    def __init__(
        self, name: str, num_pages: int, page_size: int, cost: CostModel, max_rows: int
    ) -> None:
        self.name, self.page_size, self.cost, self.max_rows = name, page_size, cost, max_rows
        self.cache = PrefixCache(num_pages, 1, log_every=0, clock=lambda: self.now_s)
        self.feed = self.cache.subscribe(EVENT_CAPACITY)
        self.now_s = 0.0
        self.busy_s = 0.0
        self.waiting: deque[SimulatedRequest] = deque()
        self.computing: SimulatedRequest | None = None
        self.computing_since_s = 0.0
        self.num_decoding = 0
        self.tokens_waiting = 0

    def add(self, request: SimulatedRequest) -> None:
        """Queue a request, with what would hit now."""
        hit = self.cache.match(self._lookup(request)).num_tokens * self.page_size
        request.num_hit = min(hit, request.num_tokens - 1)
        self.tokens_waiting += request.num_tokens - request.num_hit
        self.waiting.append(request)

    @property
    def num_requests(self) -> int:
        """Live requests."""
        return len(self.waiting) + (self.computing is not None) + self.num_decoding

    def load(self) -> Load:
        """The report when something changes; of the prompt that it computes, nothing is done yet."""
        tokens = self.tokens_waiting + self.computing_tokens
        running = self.num_decoding + (self.computing is not None)
        cost = self.cost
        return Load(tokens, len(self.waiting), running, cost.token_s, cost.step_s)

    @property
    def computing_tokens(self) -> int:
        """Of the prompt under way, in all."""
        request = self.computing
        return 0 if request is None else request.num_tokens - request.num_hit

    def begin(self, now_s: float) -> float | None:
        """Begin with the next prompt if it has a row and pages; returns when it is computed."""
        self.now_s = now_s
        rows = self.num_decoding + (self.computing is not None)
        if self.computing is not None or not self.waiting or rows >= self.max_rows:
            return None
        request = self.waiting[0]
        lease = self.cache.acquire(self._lookup(request))
        try:
            request.private = list(
                self.cache.reserve(max(0, len(request.answer) - len(lease.pages)))
            )
        except OutOfPagesError:
            self.cache.cancel(lease)
            if not rows:
                raise
            return None
        self.waiting.popleft()
        self.tokens_waiting -= request.num_tokens - request.num_hit
        request.lease, self.computing, self.computing_since_s = lease, request, now_s
        request.num_hit = min(lease.num_tokens * self.page_size, request.num_tokens - 1)
        seconds = self.cost.step_s + self.cost.token_s * (request.num_tokens - request.num_hit)
        self.busy_s += seconds
        return now_s + seconds

    def end_prompt(self, now_s: float) -> tuple[SimulatedRequest, float]:
        """The prompt is computed: its pages are shared; returns it, and when its answer ends."""
        self.now_s = now_s
        request, self.computing = self.computing, None
        assert request is not None
        self._publish(request, request.prompt)
        seconds = request.num_output * (self.cost.step_s + self.cost.token_s * self.num_decoding)
        self.num_decoding += 1
        self.busy_s += self.cost.token_s * request.num_output
        return request, now_s + seconds

    def end_answer(self, request: SimulatedRequest, now_s: float) -> None:
        """The answer is complete: its pages are shared, and the lease ends."""
        self.now_s = now_s
        self.num_decoding -= 1
        self._publish(request, request.answer)
        assert request.lease is not None
        self.cache.release(request.lease, request.private)

    def _publish(self, request: SimulatedRequest, key: CacheKey) -> None:
        assert request.lease is not None
        before = len(request.lease.pages)
        if len(key) > before:
            request.lease = self.cache.publish(request.lease, key, request.private)
            del request.private[: len(request.lease.pages) - before]

    @staticmethod
    def _lookup(request: SimulatedRequest) -> CacheKey:
        """With an atom behind the prompt's whole pages: a hit is a proper prefix."""
        return CacheKey(request.prompt.atoms + bytes(4))
