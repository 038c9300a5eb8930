"""Evict cached pages, in the order of the policy or by a predicate; clear the cache."""

from __future__ import annotations

from collections.abc import Callable

from ramify.cache.ghosts import CAPACITY, CLEARED, ENDED, PREDICATE
from ramify.cache.node_store import NodeStore
from ramify.cache.tree import SESSION_ENDED
from ramify.cache.types import Node


def evict(store: NodeStore, num_pages: int, reason: int) -> int:
    """Evict up to `num_pages` pages in the order of the policy; returns how many.

    For want of capacity, the reason of pages of ended sessions is `ENDED`.
    """
    tree, queue, evicted, now_s = store.tree, store.queue, 0, store.clock()
    resident, ticket, session = tree.resident, queue.ticket, tree.session
    of_ended = ENDED if reason == CAPACITY else reason
    while evicted < num_pages and (node := queue.first()):
        while True:
            why = of_ended if session[node] == SESSION_ENDED else reason
            evicted += evict_from(store, node, num_pages - evicted, why, now_s)
            if resident[node]:
                if not ticket[node]:
                    queue.push(node)
                break
            above = tree.parent[node]
            if not store.is_evictable(above):
                break
            if evicted >= num_pages or not _same_rank(store, node, above):
                queue.push(above)
                break
            node = above  # it would come next: skip the queue
    store.ghosts.trim()
    if store.log.observers:
        store.log.notify_observers()
    return evicted


def evict_if(store: NodeStore, predicate: Callable[[Node], bool], num_pages: int) -> int:
    """Evict leaves for which the predicate is true, and parents that become such leaves.

    Returns how many pages. Cost: one call of the predicate for each evictable leaf.
    """
    tree, now_s, evicted = store.tree, store.clock(), 0
    doomed = [node for node in sorted(store.queue.nodes()) if predicate(tree.node(node))]
    try:
        while doomed and evicted < num_pages:
            node = doomed.pop()
            parent = tree.parent[node]
            evicted += evict_from(store, node, num_pages - evicted, PREDICATE, now_s)
            if not tree.resident[node] and store.is_evictable(parent):
                store.queue.push(parent)
                if predicate(tree.node(parent)):
                    doomed.append(parent)
    finally:  # the predicate is the caller's code and may raise
        store.ghosts.trim()
        store.log.notify_observers()
    return evicted


def evict_from(store: NodeStore, node: int, num_pages: int, reason: int, now_s: float) -> int:
    """Evict up to `num_pages` pages from the tail of an evictable leaf; returns how many.

    A leaf that keeps none leaves the queue; the caller queues its parent.
    """
    tree, log = store.tree, store.log
    store.policy.on_evict(node)
    owned, cut, begin = tree.owned[node], num_pages, tree.resident[node] - num_pages
    if owned <= num_pages:  # what was released of it goes too
        cut, begin = owned, tree.resident[node] - owned
        if store.queue.ticket[node]:
            store.queue.remove(node)
        packed = tree.evict_tail(node, tree.resident[node])
    else:
        packed = tree.evict_tail(node, cut)
    store.ledger.reclaim(packed)
    store.num_evictable -= cut
    store.counters.evicted(
        reason, cut, now_s - tree.created_s[node], now_s - tree.last_access_s[node]
    )
    if log.subscribers or log.observers:
        log.removed(node, packed, reason, begin)
    store.ghosts.add(node, reason, now_s)
    return cut


def _same_rank(store: NodeStore, node: int, other: int) -> bool:
    """Whether two nodes have the same place in the eviction order."""
    policy, session = store.policy, store.tree.session
    if (session[node] == SESSION_ENDED) != (session[other] == SESSION_ENDED):
        return False
    return policy.segment(node) == policy.segment(other) and policy.rank(node) == policy.rank(other)


def clear(store: NodeStore) -> int:
    """Evict all evictable pages; returns how many.

    If nothing is left, subscribers get one event "cleared" instead of one for each run.
    """
    if store.num_evictable != store.ledger.num_tree:
        return evict(store, store.num_evictable + 1, CLEARED)
    store.log.pause()
    try:
        return evict(store, store.num_evictable + 1, CLEARED)  # and nodes that own no page
    finally:
        store.log.cleared()
