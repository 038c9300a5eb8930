"""Drafts from the prefix tree: the tokens that followed this context before."""

from __future__ import annotations

from array import array
from itertools import islice

from ramify.cache.packed import ATOM_BYTES
from ramify.cache.tree import RadixTree

# children looked at below a node, newest first: bounds the cost of a call
MAX_SIBLINGS = 64


def draft_tokens(tree: RadixTree, node: int, tail: bytes, limit: int) -> array[int]:
    """At most `limit` token ids that follow `tail` below a node; often none.

    Where the tree branches, follows the child used last. Ghosts and pending nodes serve as well as
    cached ones. Media content and salted tokens end the draft.

    Args:
        tail: packed atoms behind the node's end.
    """
    draft: array[int] = array("i")
    while len(draft) < limit:
        node = _child(tree, node, tail)
        if not node:
            break
        edge = tree.edge(node)
        known = min(len(edge), len(tail))
        if edge[:known] != tail[:known]:
            break
        draft.frombytes(edge[known : known + (limit - len(draft)) * ATOM_BYTES])
        tail = tail[known:]
    return draft[: next((index for index, atom in enumerate(draft) if atom < 0), limit)]


def _child(tree: RadixTree, node: int, tail: bytes) -> int:
    """The child that continues `tail`, which may end inside a page; 0 if none does."""
    if len(tail) >= tree.page_bytes:
        return tree.index.find(node, tail, 0)
    best, used_s = 0, 0.0
    for child in islice(tree.children(node), MAX_SIBLINGS):
        if tree.edge(child).startswith(tail) and (not best or tree.last_access_s[child] > used_s):
            best, used_s = child, tree.last_access_s[child]
    return best
