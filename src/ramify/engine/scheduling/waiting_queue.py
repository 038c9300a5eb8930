"""The order of waiting requests: least work first with ageing, and fair between tenants.

The clock is the number of tokens that the engine has computed, so that order depends on no wall
clock. A request that comes at clock t with u uncached tokens has

    virtual_arrival = t - PRIORITY_TOKENS * priority        rank = virtual_arrival + u

and within a tenant the least rank is first. Little work thus goes before much, and a larger
priority before a smaller one, both for a while: of the requests of one tenant that come after the
clock has reached a request's `virtual_arrival + number of its tokens`, none of the same or a
smaller priority goes before it, however warm and short (a priority that is larger by d goes before
it for `d * PRIORITY_TOKENS` computed tokens more). A rank changes only when pages are cached or evicted.

Between tenants the one that was served the fewest tokens is first, as in VTC (Sheng et al.,
"Fairness in Serving Large Language Models", OSDI 2024): whoever begins to wait is lifted to the
count of the tenant that was served last, so that nobody saves up. A tenant's first request
therefore waits, once there is a row and room, for at most one admission of each other tenant,
however many of their requests wait. (Where there are more tenants than are remembered, newcomers
are lifted to the most that a forgotten one was served, and wait longer.) Priorities order the
requests of one tenant only: they are the tenant's own to give.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace, nlargest

from ramify.engine.request import Request

PRIORITY_TOKENS = 1 << 17  # that one more class of priority is worth: above most prompts' lengths
SPARE_TENANTS = 64  # that are remembered though nobody waits, those that were served most
SPARE_ENTRIES = 256  # of requests that are gone, beside as many as wait: few calls clear them away


class _Tenant:
    __slots__ = ("heap", "is_queued", "number", "served")

    def __init__(self, number: int, served: int) -> None:
        self.number, self.served = number, served
        self.heap: list[tuple[int, int, Request]] = []  # rank, id; those that moved stay behind
        self.is_queued = False


class WaitingQueue:
    """Waiting requests: `peek` is whom to admit next. All calls are O(log n), amortised.

    A request may be parked behind another that computes its prefix; it is not `peek` until it is
    woken. It counts as waiting all the same.
    """

    def __init__(self) -> None:
        # `next_to_refresh` passes through it in turn
        self._waiting: OrderedDict[int, Request] = OrderedDict()
        self._tenants: dict[str, _Tenant] = {}
        self._tenant_heap: list[tuple[int, int, _Tenant]] = []  # served when entered, a lower bound
        self._served_last = 0  # what the tenant of the last admission had been served before it
        self._num_tenants = 0  # ever seen
        self._num_entries = 0  # of all heaps, those of requests that are gone included
        self.num_uncached = 0  # tokens that all of them have to compute, as far as known
        self._parked: dict[Request, list[tuple[int, Request]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting.values())

    def __contains__(self, request: Request) -> bool:
        return self._waiting.get(request.id) is request

    def add(self, request: Request, num_uncached: int) -> None:
        """Queue a request whose `virtual_arrival` is set, or give one that waits another rank."""
        if request in self:
            if request.rank == request.virtual_arrival + num_uncached and request.waits_for is None:
                return
            self.num_uncached -= request.rank - request.virtual_arrival
        self.num_uncached += num_uncached
        request.rank = request.virtual_arrival + num_uncached
        request.waits_for = None
        self._waiting[request.id] = request
        tenant = self._tenant(request.tenant)
        heappush(tenant.heap, (request.rank, request.id, request))
        self._num_entries += 1
        if not tenant.is_queued:
            tenant.is_queued = True
            tenant.served = max(tenant.served, self._served_last)
            heappush(self._tenant_heap, (tenant.served, tenant.number, tenant))
        if self._num_entries > 2 * len(self._waiting) + SPARE_ENTRIES:
            self._compact()

    def remove(self, request: Request) -> bool:
        """Take a request out; whether it was in."""
        if request not in self:
            return False
        del self._waiting[request.id]
        self.num_uncached -= request.rank - request.virtual_arrival
        request.waits_for = None
        if not self._waiting:
            self._parked.clear()  # of whoever has ended while it was parked
        return True

    def undo_add(self, request: Request) -> None:
        """Undo an `add` of a new request that was interrupted, wherever that was. O(n)."""
        self._waiting.pop(request.id, None)
        self.num_uncached = sum(one.rank - one.virtual_arrival for one in self)
        for tenant in self._tenants.values():
            tenant.is_queued = bool(tenant.heap)
        self._tenant_heap = [
            (one.served, one.number, one) for one in self._tenants.values() if one.heap
        ]
        heapify(self._tenant_heap)

    def peek(self) -> Request | None:
        """Whom to admit next."""
        line = self._tenant_heap
        while line:
            served, _, tenant = line[0]
            heap = tenant.heap
            while heap:
                rank, number, request = heap[0]
                if self._is_current(rank, number, request):
                    if served == tenant.served:
                        return request
                    break
                heappop(heap)
                self._num_entries -= 1
            else:
                heappop(line)
                tenant.is_queued = False
                continue
            heapreplace(line, (tenant.served, tenant.number, tenant))
        return None

    def admit(self, request: Request) -> None:
        """Take out a request that is about to be computed."""
        self._served_last = max(self._served_last, self._tenant(request.tenant).served)
        self.remove(request)
        self._forget_tenants()

    def _is_current(self, rank: int, number: int, request: Request) -> bool:
        """Whether an entry of a heap is that of a request that waits, and as it is now."""
        if self._waiting.get(number) is not request or request.rank != rank:
            return False
        return request.waits_for is None

    def _compact(self) -> None:
        """Drop the entries of whoever was admitted, aborted or has another rank now."""
        line = []
        for served, number, tenant in self._tenant_heap:
            tenant.heap = [one for one in tenant.heap if self._is_current(*one)]
            heapify(tenant.heap)
            tenant.is_queued = bool(tenant.heap)
            if tenant.heap:
                line.append((served, number, tenant))
        heapify(line)
        self._tenant_heap = line
        self._num_entries = sum(len(tenant.heap) for _, _, tenant in line)
        self._forget_tenants()

    def _forget_tenants(self) -> None:
        """Remember those who wait, and the few others whom it would favour most to be forgotten."""
        if len(self._tenants) <= 2 * (len(self._tenant_heap) + SPARE_TENANTS):
            return
        others = [
            (one.served, one.number, name)
            for name, one in self._tenants.items()
            if not one.is_queued and one.served > self._served_last
        ]
        kept = {name for _, _, name in nlargest(SPARE_TENANTS, others)}
        gone = [
            one.served
            for name, one in self._tenants.items()
            if not one.is_queued and name not in kept
        ]
        self._tenants = {
            name: one for name, one in self._tenants.items() if one.is_queued or name in kept
        }
        # As newcomers they would begin before those who were served more, again and again.
        self._served_last = max(self._served_last, *gone) if gone else self._served_last

    # -- tenants -----------------------------------------------------------------------------

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            self._num_tenants += 1
            tenant = self._tenants[name] = _Tenant(self._num_tenants, self._served_last)
        return tenant

    @property
    def is_multi_tenant(self) -> bool:
        """Whether there is more than one tenant, so that it matters who is served how much."""
        return self._num_tenants > 1

    def charge(self, request: Request, num_tokens: int) -> None:
        """Count tokens that are computed for a request's tenant; negative ones are given back."""
        if not self.is_multi_tenant:
            return
        tenant = self._tenant(request.tenant)
        tenant.served += num_tokens
        if num_tokens < 0 and tenant.is_queued:  # the line holds lower bounds
            self._tenant_heap = [(one.served, one.number, one) for _, _, one in self._tenant_heap]
            heapify(self._tenant_heap)

    def key(self, request: Request) -> tuple[int, int, int]:
        """What orders requests, running ones too: the least first."""
        served = self._tenant(request.tenant).served if self.is_multi_tenant else 0
        return served, request.rank, request.id

    # -- requests that wait for one that runs ------------------------------------------------

    def park(self, request: Request, leader: Request, num_tokens: int) -> None:
        """Pass over a request until `leader` has computed its first `num_tokens` tokens.

        The leader takes over the follower's rank if that is less, so that nobody waits for it
        longer than for himself.
        """
        request.waits_for = leader
        self._parked.setdefault(leader, []).append((num_tokens, request))
        leader.rank = min(leader.rank, request.rank)

    def wake(self, leader: Request, num_tokens: int) -> None:
        """The leader has computed so many tokens, or does so in this step."""
        followers = self._parked.pop(leader, None)
        if followers is None:
            return
        later = []
        for common, request in followers:
            if request not in self or request.waits_for is not leader:
                continue
            if common <= num_tokens:
                self.add(request, len(request.sequence.tokens) - common)
            else:
                later.append((common, request))
        if later:
            self._parked[leader] = later

    def wake_all(self, leader: Request) -> None:
        """The leader computes nothing any more, whatever the reason: others may lead."""
        for _, request in self._parked.pop(leader, ()):
            if request in self and request.waits_for is leader:
                self.add(request, request.rank - request.virtual_arrival)

    def leaders(self) -> list[Request]:
        """Those behind whom somebody is parked."""
        return list(self._parked)

    def next_to_refresh(self, count: int) -> list[Request]:
        """The next few in turn, whose ranks may be out of date."""
        found: list[Request] = []
        for _ in range(min(count, len(self._waiting))):
            number, request = next(iter(self._waiting.items()))
            self._waiting.move_to_end(number)
            if request.waits_for is None:
                found.append(request)
        return found
