"""Invariants of a prefix cache: recount nodes, leases, pages, queue and ghosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from ramify.cache.eviction_queue import GOES_FIRST, NOT_QUEUED
from ramify.cache.leases import Lease
from ramify.cache.node_store import NodeStore
from ramify.cache.pages import ID_BYTES, Pages
from ramify.cache.tree import SESSION_ENDED, RadixTree
from ramify.errors import InvariantError


def check_cache(store: NodeStore, leases: Collection[Lease]) -> None:
    """Raise InvariantError for the first contradiction found. O(nodes + pages)."""
    tree = store.tree
    check_tree(tree)
    nodes = list(tree.nodes())
    owned = [
        page for node in nodes for page in Pages(tree.pages[node])[_num_released(tree, node) :]
    ]
    store.ledger.check(owned)
    _check_leases(tree, leases, nodes)
    _check_queue(store, nodes)
    _check_ghosts(store, nodes)
    _check_sessions(store, nodes)


def expect(holds: object, message: str) -> None:
    """Raise InvariantError unless `holds` is true."""
    if not holds:
        raise InvariantError(message)


def check_tree(tree: RadixTree) -> None:
    """Check links, keys, lengths, and the states of parents against their children."""
    nodes, page_bytes = list(tree.nodes()), tree.page_bytes
    expect(len(nodes) == tree.num_nodes, f"{len(nodes)} nodes found, {tree.num_nodes} counted")
    for root in tree.roots.values():
        above = tree.parent[root] or tree.start[root] or tree.length[root] or tree.resident[root]
        expect(not above and tree.root[root] == root, "a root has a parent or pages")
    ghosts = [node for node in nodes if not tree.resident[node]]
    expect(len(ghosts) == tree.num_ghosts, f"{len(ghosts)} ghosts, {tree.num_ghosts} counted")
    released = sum(_num_released(tree, node) for node in nodes)
    expect(released == tree.num_released, f"{released} released, {tree.num_released} counted")
    evicted = sum(tree.length[node] - tree.resident[node] for node in nodes)
    expect(
        evicted == tree.num_ghost_pages, f"{evicted} evicted pages, {tree.num_ghost_pages} counted"
    )
    for node in nodes:
        parent, length, resident = tree.parent[node], tree.length[node], tree.resident[node]
        edge, packed = tree.edge(node), tree.pages[node]
        expect(len(edge) == length * page_bytes > 0, f"{length} pages in {len(edge)} bytes")
        expect(len(packed) == resident * ID_BYTES, f"{resident} pages in {len(packed)} bytes")
        head = packed[: _num_released(tree, node) * ID_BYTES]
        expect(head == tree.released_id * _num_released(tree, node), "a released page has an id")
        expect(tree.root[node] == tree.root[parent], "a child has another root than its parent")
        expect(
            tree.index.find(parent, edge, 0) == node, "a child is not found under its first page"
        )
        above = tree.start[parent] + tree.length[parent]
        expect(tree.start[node] == above, f"{tree.start[node]} pages above, not {above}")
        children = list(tree.children(node))
        cached = sum(tree.resident[child] > 0 for child in children)
        expect(cached == tree.resident_children[node], "resident children are miscounted")
        before = 0
        for child in children:
            expect(tree.prev_sibling[child] == before, "siblings are linked one way only")
            before = child
        used = cached or tree.ref_count[node] or tree.leader[node]
        expect(not used or resident == length, "a node in use has lost pages")
        expect(tree.ref_count[node] <= tree.ref_count[parent], "more pins below than above")
        if tree.leader[node]:
            expect(tree.ref_count[node], "a pending node is held by nobody")
        elif resident:
            expect(not tree.leader[parent], "a ready node hangs below a pending one")
    known = [node for node, edge in enumerate(tree.edges) if edge]
    expect(known == sorted(nodes), "an edge is kept without a node")
    known = [node for node, packed in enumerate(tree.pages) if packed]
    expect(len(known) == len(nodes) - len(ghosts), "pages are kept without a node")


def _num_released(tree: RadixTree, node: int) -> int:
    return tree.resident[node] - tree.owned[node]


def _check_leases(tree: RadixTree, leases: Collection[Lease], nodes: list[int]) -> None:
    pins: Counter[int] = Counter()
    for lease in leases:
        node = lease.node
        while node:
            pins[node] += 1
            node = tree.parent[node]
    for node in [*nodes, *tree.roots.values()]:
        counted, held = tree.ref_count[node], pins.pop(node, 0)
        expect(counted == held, f"a node has {counted} pins but {held} leases")
    expect(not pins, f"{len(pins)} pinned nodes have left the tree")
    leaders = {lease.leader for lease in leases}
    lost = [node for node in nodes if tree.leader[node] and tree.leader[node] not in leaders]
    expect(not lost, "a pending node's leader is gone")


def _check_queue(store: NodeStore, nodes: list[int]) -> None:
    tree, queue = store.tree, store.queue
    free = [node for node in nodes if not tree.ref_count[node] and tree.resident[node]]
    evictable = sum(tree.owned[node] for node in free)
    expect(
        evictable == store.num_evictable,
        f"{evictable} pages are evictable, {store.num_evictable} counted",
    )
    leaves = sorted(node for node in free if not tree.resident_children[node])
    expect(sorted(queue.nodes()) == leaves, "the queue does not have just the evictable leaves")
    expect(len(leaves) == queue.num_queued, "the queue's length is wrong")


def _check_ghosts(store: NodeStore, nodes: list[int]) -> None:
    tree, ghosts = store.tree, store.ghosts
    expect(tree.num_ghost_pages <= ghosts.max_pages, "more ghost pages than the budget")
    partly = sorted(node for node in nodes if tree.resident[node] < tree.length[node])
    listed = ghosts.oldest_first()
    expect(
        sorted(listed) == partly, "the list of ghosts is not that of the nodes with evicted pages"
    )
    rank = {node: i for i, node in enumerate(listed)}
    for node in listed:
        below = [rank[child] for child in tree.children(node) if child in rank]
        expect(max(below, default=-1) < rank[node], "a ghost would be forgotten before its child")


def _check_sessions(store: NodeStore, nodes: list[int]) -> None:
    tree, ticket = store.tree, store.queue.ticket
    for node in nodes:
        owner, above = tree.session[node], tree.session[tree.parent[node]]
        expect(
            not store.sessions.is_alive(owner) or above in (owner, 0),
            "a node's session has not used the node above it",
        )
        goes_first = ticket[node] == GOES_FIRST
        expect(
            ticket[node] == NOT_QUEUED or goes_first == (owner == SESSION_ENDED),
            "the queue has a node of an ended session among others",
        )
