"""The queue of evictable leaves: in order whatever is offered and removed, and no longer than it is."""

import bisect

from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.cache import RadixTree
from ramify.cache.eviction_queue import EvictionQueue
from ramify.cache.policies import Ordered
from tests.budget import examples


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 2)), max_size=200))
def test_the_queue_is_a_sorted_list(steps: list[tuple[int, int, int]]) -> None:
    """Offers at both ends and in between, removals anywhere: the first is always a least one."""
    tree = RadixTree(1)
    root = tree.add_root(b"")
    queue = EvictionQueue(
        tree, Ordered(lambda node: tree.priority[node], lambda node: tree.last_access[node])
    )
    model: list[tuple[int, int, int]] = []  # lane, key, node
    for at, (what, number, lane) in enumerate(steps):
        if what or not model:
            node = tree.add(root, at.to_bytes(4, "little"), bytes(4), 0)
            tree.priority[node], tree.last_access[node] = lane, number + at * (what == 1)
            queue.push(node)
            bisect.insort(model, (lane, tree.last_access[node], node))
        else:
            _, _, node = model.pop(number % len(model))
            queue.remove(node)
        first = queue.first()
        assert (tree.priority[first], tree.last_access[first]) == (
            model[0][:2] if model else (0, 0)
        )
        assert sorted(queue.nodes()) == sorted(node for _, _, node in model)
        assert queue.num_queued == len(model)
        spilled = [len(lane.unordered) for lane in queue._segments.values()]
        assert all(length <= 2 * len(steps) for length in spilled)
    while model:
        first = queue.first()
        lane, number, _ = model.pop(0)
        assert (tree.priority[first], tree.last_access[first]) == (lane, number)
        queue.remove(first)
        model = sorted(
            (tree.priority[node], tree.last_access[node], node) for node in queue.nodes()
        )
    assert (queue.first(), queue._segments) == (0, {})


def test_entries_that_do_not_count_are_dropped_from_the_heap() -> None:
    """However often a node cuts in and leaves again, the heap stays as long as the queue."""
    tree = RadixTree(1)
    root = tree.add_root(b"")
    queue = EvictionQueue(tree, Ordered(None, lambda node: tree.last_access[node]))
    nodes = [tree.add(root, at.to_bytes(4, "little"), bytes(4), 0) for at in range(3)]
    for at, node in enumerate(nodes):
        tree.last_access[node] = (0, 10, 5)[at]
        queue.push(node)

    for _ in range(1000):
        queue.remove(nodes[2])
        queue.push(nodes[2])

    assert len(queue._segments[0].unordered) <= 2 + 64 + 1
    assert queue.first() == nodes[0]
