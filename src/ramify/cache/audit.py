"""Recounts everything a prefix cache keeps, from nothing but its nodes, leases and pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from ramify.cache.book import Lease
from ramify.cache.pages import ID_BYTES, Pages
from ramify.cache.store import PageStore
from ramify.cache.tree import RadixTree
from ramify.errors import InvariantError


def check_cache(store: PageStore, leases: Collection[Lease]) -> None:
    """Raise InvariantError for the first contradiction found. O(nodes + pages)."""
    tree = store.tree
    check_tree(tree)
    nodes = list(tree.nodes())
    store.ledger.check([page for node in nodes for page in Pages(tree.packed_pages(node))])
    _check_leases(tree, leases, nodes)
    _check_queue(store, nodes)
    _check_ghosts(store, nodes)


def require(holds: object, told: str) -> None:
    """Raise InvariantError unless something holds."""
    if not holds:
        raise InvariantError(told)


def check_tree(tree: RadixTree) -> None:
    """Links, keys, lengths and the state that parents and children must share."""
    nodes, page_bytes = list(tree.nodes()), tree.page_bytes
    require(len(nodes) == tree.num_nodes, f"{len(nodes)} nodes found, {tree.num_nodes} counted")
    for root in tree.roots.values():
        above = tree.parent[root] or tree.start[root] or tree.length[root] or tree.resident[root]
        require(not above and tree.root[root] == root, "a root has a parent or pages")
    ghosts = [node for node in nodes if not tree.resident[node]]
    require(len(ghosts) == tree.num_ghosts, f"{len(ghosts)} ghosts, {tree.num_ghosts} counted")
    evicted = sum(tree.length[node] - tree.resident[node] for node in nodes)
    require(
        evicted == tree.num_ghost_pages, f"{evicted} evicted pages, {tree.num_ghost_pages} counted"
    )
    for node in nodes:
        parent, length, resident = tree.parent[node], tree.length[node], tree.resident[node]
        edge, packed = tree.edge(node), tree.packed_pages(node)
        require(len(edge) == length * page_bytes > 0, f"{length} pages in {len(edge)} bytes")
        require(len(packed) == resident * ID_BYTES, f"{resident} pages in {len(packed)} bytes")
        require(tree.root[node] == tree.root[parent], "a child has another root than its parent")
        require(
            tree.index.find(parent, edge, 0) == node, "a child is not found under its first page"
        )
        above = tree.start[parent] + tree.length[parent]
        require(tree.start[node] == above, f"{tree.start[node]} pages above, not {above}")
        children = list(tree.children(node))
        cached = sum(tree.resident[child] > 0 for child in children)
        require(cached == tree.resident_children[node], "resident children are miscounted")
        before = 0
        for child in children:
            require(tree.prev_sibling[child] == before, "siblings are linked one way only")
            before = child
        used = cached or tree.pins[node] or tree.holder[node]
        require(not used or resident == length, "a node in use has lost pages")
        require(tree.pins[node] <= tree.pins[parent], "more pins below than above")
        if tree.holder[node]:
            require(tree.pins[node], "a pending node is held by nobody")
        elif resident:
            require(not tree.holder[parent], "a ready node hangs below a pending one")
    known = [node for node, edge in enumerate(tree.edges) if edge]
    require(known == sorted(nodes), "an edge is kept without a node")
    known = [node for node, packed in enumerate(tree.pages) if packed]
    require(len(known) == len(nodes) - len(ghosts), "pages are kept without a node")


def _check_leases(tree: RadixTree, leases: Collection[Lease], nodes: list[int]) -> None:
    pins: Counter[int] = Counter()
    for lease in leases:
        at = lease.node
        while at:
            pins[at] += 1
            at = tree.parent[at]
    for node in [*nodes, *tree.roots.values()]:
        counted, held = tree.pins[node], pins.pop(node, 0)
        require(counted == held, f"a node has {counted} pins but {held} leases")
    require(not pins, f"{len(pins)} pinned nodes have left the tree")
    holders = {lease.holder for lease in leases}
    lost = [node for node in nodes if tree.holder[node] and tree.holder[node] not in holders]
    require(not lost, "a pending node's leader is gone")


def _check_queue(store: PageStore, nodes: list[int]) -> None:
    tree, queue = store.tree, store.queue
    free = [node for node in nodes if not tree.pins[node] and tree.resident[node]]
    evictable = sum(tree.resident[node] for node in free)
    require(
        evictable == store.num_evictable,
        f"{evictable} pages are evictable, {store.num_evictable} counted",
    )
    leaves = sorted(node for node in free if not tree.resident_children[node])
    require(sorted(queue.nodes()) == leaves, "the queue does not have just the evictable leaves")
    require(len(leaves) == queue.num_queued, "the queue's length is wrong")


def _check_ghosts(store: PageStore, nodes: list[int]) -> None:
    tree, ghosts = store.tree, store.ghosts
    require(tree.num_ghost_pages <= ghosts.max_pages, "more is remembered than may be")
    partly = sorted(node for node in nodes if tree.resident[node] < tree.length[node])
    listed = ghosts.oldest_first()
    require(sorted(listed) == partly, "the ghosts listed are not those there are")
    rank = {node: i for i, node in enumerate(listed)}
    for node in listed:
        below = [rank[child] for child in tree.children(node) if child in rank]
        require(max(below, default=-1) < rank[node], "a ghost would be forgotten before its child")
