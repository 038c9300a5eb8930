"""Reason for a cache miss: how far a key hits, and what stops it there."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from ramify.cache.content_atoms import slice_atoms
from ramify.cache.ghosts import REASONS, WINDOW, Ghosts
from ramify.cache.key import CacheKey
from ramify.cache.packed import ATOM_BYTES, shared_pages
from ramify.cache.tree import RadixTree
from ramify.outputs import Explanation

MAX_SIBLINGS = 64  # compared to find the longest common prefix
MAX_CHILDREN = 1024  # visited to find siblings: most may be private
MAX_NAMESPACES = 64  # searched for the same prefix


def explain_key(
    tree: RadixTree,
    ghosts: Ghosts,
    key: CacheKey,
    usable: int,
    now_s: float,
    pin_refused: str,
    may_tell: Callable[[bytes], bool] | None,
    *,
    pending: bool = False,
) -> Explanation:
    """Follow a key through cached nodes and ghosts; changes nothing.

    Args:
        usable: bytes of its atoms that a lookup may match.
        pending: pages that are being computed hit too, as in `PrefixCache.attach`.
        may_tell: whether another namespace may be named; the others have no influence.

    Cost: a match, and a comparison with at most 64 siblings or namespaces.
    """

    def or_elsewhere(here: Explanation | None) -> Explanation:
        here = here or Explanation(total, hit, "never_seen")
        return _or_elsewhere(tree, root, usable, here, key, may_tell)

    atoms, page_bytes, size, total = key.atoms, tree.page_bytes, tree.page_size, len(key)
    root = tree.roots.get(key.namespace, 0)
    path, part, covered = tree.find(root, atoms, usable, pending=pending) if root else ([], 0, 0)
    node = path[-1] if path else root
    pages = tree.num_matched_pages(path, part, covered)
    hit, position = pages * size, pages * page_bytes
    if position >= usable:
        # The last token, or its whole page, is always computed.
        is_all = total - hit in (0, 1, size)
        return Explanation(total, hit, "hit" if is_all else "page_tail")
    if part and covered == tree.resident[part] < tree.length[part]:
        child, inside = part, covered  # the rest of this node was evicted
    elif part:
        return or_elsewhere(_diverged(tree, part, covered, key, hit))
    else:
        child, inside = tree.index.find(node, atoms, position) if root else 0, 0
    if child:
        edge = tree.edge(child)[inside * page_bytes :]
        shared = min(
            shared_pages(atoms, position, edge, page_bytes), (usable - position) // page_bytes
        )
        if tree.leader[child]:
            return Explanation(total, hit, "pending")
        if shared:
            is_released = tree.owned[child] < tree.resident[child] > inside
            gone = shared
            if inside + shared == tree.length[child]:
                below = tree.find_including_evicted(
                    child, atoms, position + shared * page_bytes, usable
                )
                gone += sum(count for _, count in below)
            return Explanation(
                total,
                hit,
                "evicted",
                evicted_tokens=gone * size,
                evicted_by=REASONS[WINDOW if is_released else ghosts.reason[child]],
                evicted_ago_s=now_s - ghosts.evicted_s[child],
                idle_s=max(0.0, ghosts.evicted_s[child] - tree.last_access_s[child]),
                pin_refused=pin_refused,
            )
        return or_elsewhere(None)  # the diverging node is not cached any more
    return or_elsewhere(_nearest(tree, node, key, hit) if root else None)


def _diverged(tree: RadixTree, node: int, page: int, key: CacheKey, hit: int) -> Explanation | None:
    """Explain that a node differs from the key from `page` on; None if the difference is private."""
    edge = tree.edge(node)[page * tree.page_bytes :]
    same = shared_pages(edge, 0, memoryview(key.atoms)[hit * ATOM_BYTES :], ATOM_BYTES)
    if key.marks or node in tree.content:
        theirs, ours = tree.content_from(node, page), slice_atoms(key.marks, hit, len(key))
        salts = [
            position
            for position, atom in (*theirs, *ours)
            if position >= same and atom.salt is not None
        ]
        # A salt that both share lies before `same`.
        if salts:
            edge = edge[: min(salts) * ATOM_BYTES]
            if same * ATOM_BYTES == len(edge):
                return None
    return Explanation(len(key), hit, "diverged", diverged_at=hit + same, sibling=edge)


def _nearest(tree: RadixTree, node: int, key: CacheKey, hit: int) -> Explanation | None:
    """Explain by the child of a node that shares the longest prefix with the key."""
    begin = hit * ATOM_BYTES
    rest, first = memoryview(key.atoms)[begin:], key.atoms[begin : begin + ATOM_BYTES]
    best, furthest, left = 0, hit - 1, MAX_SIBLINGS
    for child in islice(tree.children(node), MAX_CHILDREN):
        near, is_there = -1, tree.resident[child] and not tree.leader[child]
        if key.marks or child in tree.content:
            explanation = _diverged(tree, child, 0, key, hit)
            # Private content counts as absent.
            if explanation is None:
                continue
            near = explanation.diverged_at or 0
        elif is_there:
            edge = tree.edge(child)
            near = hit + (shared_pages(edge, 0, rest, ATOM_BYTES) if edge.startswith(first) else 0)
        if is_there and near > furthest:
            best, furthest = child, near
        left -= 1
        if not left:
            break
    return _diverged(tree, best, 0, key, hit) if best and furthest > 0 else None


def _or_elsewhere(
    tree: RadixTree,
    own: int,
    usable: int,
    here: Explanation,
    key: CacheKey,
    may_tell: Callable[[bytes], bool] | None,
) -> Explanation:
    """Explain by another namespace that holds more of the key; else `here`."""
    best, best_tokens = None, here.diverged_at or here.hit_tokens
    others = (
        (namespace, root)
        for namespace, root in tree.roots.items()
        if root != own and (may_tell is None or may_tell(namespace))
    )
    for namespace, root in islice(others, MAX_NAMESPACES):
        tokens = (
            tree.num_matched_pages(*tree.find(root, key.atoms, usable, pending=False))
            * tree.page_size
        )
        if tokens > best_tokens:
            best, best_tokens = namespace, tokens
    if best is None:
        return here
    return Explanation(
        len(key),
        here.hit_tokens,
        "namespace",
        other_namespace=best,
        other_tokens=best_tokens,
    )
