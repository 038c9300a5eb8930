"""What followed a context before: the tree read downwards, as a source of guesses."""

from __future__ import annotations

from array import array
from itertools import islice

from ramify.cache.packed import ATOM_BYTES
from ramify.cache.tree import RadixTree

MAX_SIBLINGS = 64  # that are looked at below one node, newest first: bounds the cost of a call


def draft_tokens(tree: RadixTree, node: int, tail: bytes, limit: int) -> array[int]:
    """At most `limit` token ids that came after `tail` below a node; often none.

    Where the text went on in several ways, the way whose node was used last. Pages that were
    evicted, or are still being computed, tell what came next as well as others do. Media content
    and salted tokens end it: nothing behind them follows from what the caller has.

    Args:
        tail: packed atoms that follow the node's end.
    """
    found: array[int] = array("i")
    while len(found) < limit:
        node = _child(tree, node, tail)
        if not node:
            break
        edge = tree.edge(node)
        known = min(len(edge), len(tail))
        if edge[:known] != tail[:known]:
            break
        found.frombytes(edge[known : known + (limit - len(found)) * ATOM_BYTES])
        tail = tail[known:]
    return found[: next((at for at, atom in enumerate(found) if atom < 0), limit)]


def _child(tree: RadixTree, node: int, tail: bytes) -> int:
    """The child that goes on with `tail`, of which a page may not be full; 0 if none does."""
    if len(tail) >= tree.page_bytes:
        return tree.index.find(node, tail, 0)
    best, used_s = 0, 0.0
    for child in islice(tree.children(node), MAX_SIBLINGS):
        if tree.edge(child).startswith(tail) and (not best or tree.last_access_s[child] > used_s):
            best, used_s = child, tree.last_access_s[child]
    return best
