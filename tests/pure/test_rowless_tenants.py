"""Which tenant has waited longest without a row: the queue against a list of events."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.engine.request import Request
from ramify.engine.scheduling.waiting_queue import WaitingQueue
from tests.budget import examples
from tests.pure.engine_bench import Bench

ACTIONS = st.sampled_from(["add", "admit", "admit and undo", "remove", "free", "tick", "ask"])


class Model:
    """Waiting requests by tenant, and since which event each tenant waits."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Request]] = {name: [] for name in "abc"}
        self.since: dict[str, tuple[int, int]] = {}  # (step, number of the event)

    def first(self, holders: set[str], limit: int) -> str | None:
        """The tenant that waits longest without a row, since step `limit` or before."""
        rowless = [
            (self.since[name], name)
            for name, requests in self.waiting.items()
            if requests and name not in holders and self.since[name][0] <= limit
        ]
        return min(rowless)[1] if rowless else None


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(
        st.tuples(ACTIONS, st.sampled_from("abc"), st.integers(0, 7), st.integers(0, 5)),
        max_size=40,
    )
)
def test_the_longest_wait_without_a_row_is_found(
    events: list[tuple[str, str, int, int]],
) -> None:
    """A tenant waits since its first request came, or since it lost a row; a failed plan is no end."""
    bench, queue, model = Bench(), WaitingQueue(), Model()
    for number, (action, name, holders_bits, age) in enumerate(events):
        own = model.waiting[name]
        if action == "add":
            key = bench.add([1], tenant=name)
            request = bench.core.lifecycle.requests[key]
            queue.add(request, 1)
            if not own:
                model.since[name] = (queue.step, number)
            own.append(request)
        elif action == "admit" and own:
            queue.admit(own.pop(0))
        elif action == "admit and undo" and own:
            queue.admit(own[0])
            queue.undo_admit(own[0])
        elif action == "remove" and own:
            assert queue.remove(own.pop())
        elif action == "free":
            queue.row_freed(name)
            if own:
                model.since[name] = (queue.step, number)
        elif action == "tick":
            queue.step += 1
        holders = {tenant for bit, tenant in enumerate("abc") if holders_bits >> bit & 1}
        limit = queue.step - age

        first = queue.first_rowless(holders, limit)

        assert (first and first.tenant) == model.first(holders, limit)
        assert queue.num_tenants_waiting == sum(map(bool, model.waiting.values()))
        for tenant, requests in model.waiting.items():
            assert queue.num_waiting(tenant) == len(requests)
