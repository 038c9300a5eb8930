"""Waiting queue: shortest work first with ageing, fair between tenants.

The clock is the number of tokens that the engine has computed, so the order depends on no wall
clock. A request that arrives at clock t with u uncached tokens has

    virtual_arrival = t - PRIORITY_TOKENS * priority        rank = virtual_arrival + u

and within a tenant the smallest rank is first. So little work goes before much, and a larger
priority before a smaller one, both for a limited time: once the clock has reached a request's
`virtual_arrival + number of its tokens`, no later request of its tenant with the same or a smaller
priority goes before it, however short its uncached part. One with a priority larger by d does so
for `d * PRIORITY_TOKENS` computed tokens more. A rank changes when pages are cached or evicted.

Between tenants, the one that was served the fewest tokens is first, as in VTC (Sheng et al.,
"Fairness in Serving Large Language Models", OSDI 2024). A tenant that begins to wait is lifted to
the count of the tenant served last, so idle tenants save up nothing. Hence a tenant's first request
waits, once there is a free row and pages, for at most one admission of each other tenant. (Beyond
the number of tenants that are remembered, newcomers are lifted to the largest count of a forgotten
one, and wait longer.) Priorities order the requests of one tenant only.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator
from heapq import heapify, heappop, heappush, heapreplace, nlargest

from ramify.engine.request import Request

PRIORITY_TOKENS = 1 << 17  # worth of one level of priority; longer than most prompts
SPARE_TENANTS = 64  # tenants remembered without waiting requests, those that were served most
SPARE_ENTRIES = 256  # stale heap entries, besides one per waiting request, before `_compact`


class _Tenant:
    """Served tokens and waiting requests of one tenant."""

    __slots__ = ("heap", "number", "served")

    def __init__(self, number: int, served: int) -> None:
        self.number, self.served = number, served
        self.heap: list[tuple[int, int, Request]] = []  # (rank, id, request), stale entries too


class WaitingQueue:
    """Waiting requests; `peek` returns the next to admit. Calls are O(log n), amortised.

    A request may be parked behind a running one that computes its prefix, or held while a tier loads
    it. It still counts as waiting, but `peek` skips it until it is woken.
    """

    def __init__(self) -> None:
        # By id, in the order in which `next_to_refresh` visits them.
        self._waiting: OrderedDict[int, Request] = OrderedDict()
        self._tenants: dict[str, _Tenant] = {}
        # (served, number, tenant); `served` is from when it was pushed, a lower bound.
        self._tenant_heap: list[tuple[int, int, _Tenant]] = []
        self._served_last = 0  # served tokens of the last admission's tenant, before it
        self._num_tenants = 0  # ever seen
        self._num_entries = 0  # in the heaps of all tenants, stale ones included
        self.num_uncached = 0  # tokens of all waiting requests, when they were last ranked
        # leader → (tokens of it to wait for, request)
        self._parked: dict[Request, list[tuple[int, Request]]] = {}
        self._num_waiting: Counter[str] = Counter()  # by tenant
        self.step = 0  # number of the scheduler's step
        # By tenant: the step since which it waits, or lost a row while it waited; oldest first.
        # May hold tenants that do not wait any more.
        self._waits_since: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting.values())

    def __contains__(self, request: Request) -> bool:
        return self._waiting.get(request.id) is request

    def num_waiting(self, tenant: str) -> int:
        """Waiting requests of a tenant."""
        return self._num_waiting[tenant]

    @property
    def num_tenants_waiting(self) -> int:
        """Tenants with waiting requests."""
        return len(self._num_waiting)

    def add(self, request: Request, num_uncached: int) -> None:
        """Queue a request whose `virtual_arrival` is set, or re-rank one that waits."""
        if request not in self and not self._num_waiting[request.tenant]:
            self._begin_to_wait(request.tenant)
        self._enqueue(request, num_uncached)

    def undo_admit(self, request: Request) -> None:
        """Queue a request again that `admit` has just removed."""
        self._enqueue(request, request.rank - request.virtual_arrival)
        self._waits_since.setdefault(request.tenant, self.step)

    def _enqueue(self, request: Request, num_uncached: int) -> None:
        if request in self:
            is_peekable = request.waits_for is None and not request.is_held
            if request.rank == request.virtual_arrival + num_uncached and is_peekable:
                return
            self.num_uncached -= request.rank - request.virtual_arrival
        else:
            self._num_waiting[request.tenant] += 1
        self.num_uncached += num_uncached
        request.rank = request.virtual_arrival + num_uncached
        request.waits_for, request.is_held = None, False
        self._waiting[request.id] = request
        tenant = self._tenant(request.tenant)
        begins_to_wait = not tenant.heap
        heappush(tenant.heap, (request.rank, request.id, request))
        self._num_entries += 1
        if begins_to_wait:
            tenant.served = max(tenant.served, self._served_last)
            heappush(self._tenant_heap, (tenant.served, tenant.number, tenant))
        if self._num_entries > 2 * len(self._waiting) + SPARE_ENTRIES:
            self._compact()

    def remove(self, request: Request) -> bool:
        """Remove a request; returns whether it was waiting."""
        if request not in self:
            return False
        del self._waiting[request.id]
        self.num_uncached -= request.rank - request.virtual_arrival
        request.waits_for, request.is_held = None, False
        self._num_waiting[request.tenant] -= 1
        if not self._num_waiting[request.tenant]:
            del self._num_waiting[request.tenant]
        if not self._waiting:
            self._parked.clear()  # only requests that ended while parked are left
        return True

    def undo_add(self, request: Request) -> None:
        """Undo an `add` of a new request that an interrupt cut off anywhere. O(n)."""
        self._waiting.pop(request.id, None)
        self.num_uncached = sum(waiting.rank - waiting.virtual_arrival for waiting in self)
        self._num_waiting = Counter(waiting.tenant for waiting in self)
        self._compact()

    def peek(self) -> Request | None:
        """The next request to admit; None if all are parked or none waits."""
        tenants = self._tenant_heap
        while tenants:
            served, _, tenant = tenants[0]
            request = self._first_of(tenant)
            if request is None:
                heappop(tenants)
            elif served == tenant.served:
                return request
            else:
                heapreplace(tenants, (tenant.served, tenant.number, tenant))
        return None

    def _first_of(self, tenant: _Tenant) -> Request | None:
        """The request of a tenant with the smallest rank that is not parked."""
        heap = tenant.heap
        while heap:
            rank, number, request = heap[0]
            if self._is_current(rank, number, request):
                return request
            heappop(heap)
            self._num_entries -= 1
        return None

    def admit(self, request: Request) -> None:
        """Remove a request that the step about to be planned computes."""
        self._served_last = max(self._served_last, self._tenant(request.tenant).served)
        self.remove(request)
        self._forget_tenants()

    def _is_current(self, rank: int, number: int, request: Request) -> bool:
        """Whether a heap entry belongs to a waiting, not parked request of this rank."""
        if self._waiting.get(number) is not request or request.rank != rank:
            return False
        return request.waits_for is None and not request.is_held

    def _compact(self) -> None:
        """Drop the heap entries of requests that were admitted, aborted or re-ranked."""
        self._num_entries = 0
        for tenant in self._tenants.values():
            tenant.heap = [entry for entry in tenant.heap if self._is_current(*entry)]
            heapify(tenant.heap)
            self._num_entries += len(tenant.heap)
        self._rebuild_tenant_heap()
        self._forget_tenants()

    def _rebuild_tenant_heap(self) -> None:
        self._tenant_heap = [
            (tenant.served, tenant.number, tenant)
            for tenant in self._tenants.values()
            if tenant.heap
        ]
        heapify(self._tenant_heap)

    def _forget_tenants(self) -> None:
        """Keep the tenants that wait, and the SPARE_TENANTS others that were served most."""
        if len(self._waits_since) > 2 * (len(self._num_waiting) + SPARE_TENANTS):
            self._waits_since = {
                name: since for name, since in self._waits_since.items() if self._num_waiting[name]
            }
        if len(self._tenants) <= 2 * (len(self._tenant_heap) + SPARE_TENANTS):
            return
        idle = [
            (tenant.served, tenant.number, name)
            for name, tenant in self._tenants.items()
            if not tenant.heap and tenant.served > self._served_last
        ]
        kept = {name for _, _, name in nlargest(SPARE_TENANTS, idle)}
        kept.update(name for name, tenant in self._tenants.items() if tenant.heap)
        for name in self._tenants.keys() - kept:
            # Lift newcomers to the forgotten's count: else a tenant could gain by being forgotten.
            self._served_last = max(self._served_last, self._tenants.pop(name).served)

    # -- tenants -----------------------------------------------------------------------------

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            self._num_tenants += 1
            tenant = self._tenants[name] = _Tenant(self._num_tenants, self._served_last)
        return tenant

    @property
    def is_multi_tenant(self) -> bool:
        """Whether there was ever more than one tenant; else nothing is charged."""
        return self._num_tenants > 1

    def charge(self, request: Request, num_tokens: int) -> None:
        """Count tokens as served to a request's tenant; a negative number takes them back."""
        if not self.is_multi_tenant:
            return
        tenant = self._tenant(request.tenant)
        tenant.served += num_tokens
        if num_tokens < 0 and tenant.heap:  # the heap must hold lower bounds
            self._rebuild_tenant_heap()

    def num_served(self, request: Request) -> int:
        """Tokens that a request's tenant was served; 0 if there was only one tenant ever."""
        return self._tenant(request.tenant).served if self.is_multi_tenant else 0

    def key(self, request: Request) -> tuple[int, int, int]:
        """Sort key of waiting and running requests; the smallest is first."""
        return self.num_served(request), request.rank, request.id

    # -- tenants without a row ---------------------------------------------------------------

    def _begin_to_wait(self, tenant: str) -> None:
        self._waits_since.pop(tenant, None)
        self._waits_since[tenant] = self.step

    def row_freed(self, tenant: str) -> None:
        """A running request of a tenant has ended or was preempted."""
        if self._num_waiting[tenant]:
            self._begin_to_wait(tenant)

    def first_rowless(self, holders: Collection[str], limit: int) -> Request | None:
        """The first request of the tenant that waits longest without a row, since step `limit`.

        Args:
            holders: tenants that have a row.
        """
        ended: list[str] = []
        first = None
        for tenant, since in self._waits_since.items():
            if not self._num_waiting[tenant]:
                ended.append(tenant)
                continue
            if since > limit:
                break
            first = None if tenant in holders else self._first_of(self._tenant(tenant))
            if first is not None:
                break
        for tenant in ended:
            del self._waits_since[tenant]
        return first

    # -- parked requests ---------------------------------------------------------------------

    @property
    def has_parked(self) -> bool:
        """Whether a request may be parked."""
        return bool(self._parked)

    def park(self, request: Request, leader: Request, num_tokens: int) -> None:
        """Skip a request in `peek` until `leader` has computed its first `num_tokens` tokens.

        The leader inherits the request's rank if that is smaller, so that the request does not wait
        longer than on its own.
        """
        request.waits_for = leader
        self._parked.setdefault(leader, []).append((num_tokens, request))
        leader.rank = min(leader.rank, request.rank)

    def hold(self, request: Request) -> None:
        """Skip a request in `peek` until `add` ranks it again: its pages are being loaded."""
        request.is_held = True

    def wake(self, leader: Request, num_tokens: int) -> None:
        """Wake requests that wait for at most `num_tokens` tokens of a leader."""
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

    def wake_abandoned(self, prefilling: Collection[Request]) -> None:
        """Wake all requests parked behind a leader that is not one of `prefilling` any more."""
        for leader in [leader for leader in self._parked if leader not in prefilling]:
            for _, request in self._parked.pop(leader):
                if request in self and request.waits_for is leader:
                    self.add(request, request.rank - request.virtual_arrival)

    def next_to_refresh(self, count: int) -> list[Request]:
        """Up to `count` waiting requests in turn, to have their ranks recomputed."""
        requests: list[Request] = []
        for _ in range(min(count, len(self._waiting))):
            number, request = next(iter(self._waiting.items()))
            self._waiting.move_to_end(number)
            if request.waits_for is None and not request.is_held:
                requests.append(request)
        return requests
