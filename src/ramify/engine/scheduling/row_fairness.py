"""Fair rows: a tenant that waits without a running request gets a row of the tenant that holds most.

The queue is fair to tenants once a row is free; nothing frees a row while another tenant's requests
run for minutes. So a tenant that has waited without a row for `wait_steps` steps is *starving*: its
first request goes before all others, and if there is no row or no page for it, one running request
per step is preempted. Preempted requests keep their pages in the cache while these are not needed,
and go on with the same tokens later.

No thrash: a running request may be preempted once it has had `wait_steps` output tokens since its
admission, or, before its first preemption, `wait_steps` steps. That of a tenant with one row needs
`SINGLE_ROW_FACTOR` times as many tokens, and is preempted for its row only, never for its pages.

Pages that are taken have to be computed again. So they are taken from tenants only that were served
at least as many tokens as the starving one: else one that sends prompts as large as the pool, one
after the other, would get most of the work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ramify.engine.request import Request
from ramify.engine.scheduling.waiting_queue import WaitingQueue

SINGLE_ROW_FACTOR = 32


class RowFairness:
    """Finds starving tenants, and the request to preempt for them.

    Args:
        wait_steps: steps after which a tenant without a row is starving; 0: never.
    """

    def __init__(self, queue: WaitingQueue, wait_steps: int) -> None:
        self._queue, self.wait_steps = queue, wait_steps

    def starving_request(self, running: Sequence[Request], step: int) -> Request | None:
        """The first request of the tenant that starves longest; None if no tenant does.

        Cost: O(running requests).
        """
        if not self.wait_steps or not running or not self._queue.is_multi_tenant:
            return None
        holders = {request.tenant for request in running}
        return self._queue.first_rowless(holders, step - self.wait_steps)

    def may_take_pages(self, starving: Request, running: Sequence[Request]) -> bool:
        """Whether `victim` could ever name a request whose pages the starving one may take."""
        num_rows = Counter(request.tenant for request in running)
        return any(self._owes_pages(request, starving, num_rows) for request in running)

    def _owes_pages(self, request: Request, starving: Request, num_rows: Counter[str]) -> bool:
        served = self._queue.num_served
        return num_rows[request.tenant] > 1 and served(request) >= served(starving)

    def victim(
        self, starving: Request, running: Sequence[Request], step: int, *, needs_pages: bool
    ) -> Request | None:
        """The newest row of the tenant that holds most, among the requests that may be preempted.

        Args:
            needs_pages: there are too few pages; False: all rows are taken.
        """
        num_rows = Counter(request.tenant for request in running)
        candidates = [
            request
            for request in running
            if (not needs_pages or self._owes_pages(request, starving, num_rows))
            and self._has_been_served(request, step, num_rows[request.tenant])
        ]
        return min(
            candidates,
            key=lambda request: (
                -num_rows[request.tenant],
                request.priority,
                -request.admitted_step,
                -request.id,
            ),
            default=None,
        )

    def _has_been_served(self, request: Request, step: int, num_rows: int) -> bool:
        num_output = len(request.output_ids) - request.num_output_admitted
        if num_rows == 1:
            return num_output >= SINGLE_ROW_FACTOR * self.wait_steps
        if num_output >= self.wait_steps:
            return True
        return not request.preemptions and step - request.admitted_step >= self.wait_steps
