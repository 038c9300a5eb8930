"""Part of a cached page: the page that goes on like a prompt for the most tokens, to be copied.

Pages are shared whole. Where a prompt leaves the tree inside a page, that page may be copied, and only
the tokens from the difference on are computed. Atoms are compared below the prompt's own root, so that
namespaces, salts and media separate prompts inside a page as they do between pages.
"""

# ruff: noqa: SLF001 - these functions are methods of PrefixCache in a file of their own

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ramify.cache.call_guard import guarded
from ramify.cache.content_atoms import ContentAtom
from ramify.cache.key import CacheKey, key_of_atoms
from ramify.cache.leases import Lease
from ramify.cache.packed import ATOM_BYTES, shared_pages
from ramify.cache.pages import ID_BYTES, Pages
from ramify.cache.prefix_cache import PrefixCache
from ramify.cache.tree import RadixTree

MAX_VISITED: Final = 64  # children of a node that are looked at, newest first


def least_copied(page_size: int) -> int:
    """The least tokens that are copied, a quarter of a page: fewer are computed in the time of a copy."""
    return max(1, page_size // 4)


@dataclass(frozen=True, slots=True)
class PartialPage:
    """A computed page whose first tokens continue a prefix; pinned until its lease is ended."""

    page: int
    num_tokens: int  # that it has in common with the prompt, less than a page
    lease: Lease  # on the page and the prefix before it


@guarded
def count_partial_tokens(cache: PrefixCache, key: CacheKey) -> int:
    """Tokens behind `cache.match(key)` that a copy of part of a page would save; changes nothing.

    At least one token of the key is left to compute. It is 0 below `least_copied`, and with pages of
    one token.
    """
    num_tokens = _count_tokens(cache, key)
    return num_tokens if num_tokens >= least_copied(cache.page_size) else 0


def _count_tokens(cache: PrefixCache, key: CacheKey) -> int:
    tree, atoms = cache._tree, key.atoms
    end, root = cache._lease_ops.matchable_bytes(key), tree.roots.get(key.namespace, 0)
    if not root or cache.page_size == 1:
        return 0
    path, part, covered = tree.find(root, atoms, end, pending=False)
    position = tree.num_matched_pages(path, part, covered) * tree.page_bytes
    if not part:
        return _nearest_child(tree, path[-1] if path else root, atoms, position)[1]
    if not tree.resident[part] - tree.owned[part] <= covered < tree.resident[part]:
        return 0
    return _num_shared(tree, part, covered, atoms, position)


@guarded
def pin_partial_page(cache: PrefixCache, lease: Lease, key: CacheKey) -> PartialPage | None:
    """Pin the computed page behind a lease that shares the most tokens with `key`; None: no page does.

    Copy the page to a private page, all planes of it, before anything else writes to that one; then
    the K/V of its first `num_tokens` tokens is there. Then call `unpin_partial_page`. The pin is a
    lease without a lookup: nothing counts as used.

    Of the pages that begin behind the lease, the newest `MAX_VISITED` are compared. It is none if that is
    fewer than `least_copied`.

    Args:
        lease: as `acquire` or `attach` returned it for `key`.

    Raises:
        LeaseError: the lease is not live.
    """
    cache._registry.require(lease)
    tree, store, node = cache._tree, cache._store, lease.node
    at_end = (tree.start[node] + tree.length[node]) * tree.page_size == lease.num_tokens
    if cache.page_size == 1 or tree.leader[node] or not at_end:
        return None
    child, num_tokens = _nearest_child(tree, node, key.atoms, lease.num_tokens * ATOM_BYTES)
    if num_tokens < least_copied(cache.page_size):
        return None
    if tree.resident[child] < tree.length[child]:  # a node that is held is resident in full
        child = store.split(child, tree.resident[child])
    store.pin_path(tree.root[child], tree.path(child))
    # It ends at the node of the page but holds no more than the prefix before it.
    source = cache._registry.open(lease.full_key, lease.num_tokens, lease.packed_pages, child)
    return PartialPage(Pages(tree.pages[child][:ID_BYTES])[0], num_tokens, source)


@guarded
def unpin_partial_page(cache: PrefixCache, partial: PartialPage) -> None:
    """End the pin on a page: it was copied, or will not be.

    Raises:
        LeaseError: its lease is not live.
    """
    cache._registry.require(partial.lease, withdrawn=True)
    cache._lease_ops.cancel_pin(partial.lease)


@guarded
def key_of_partial_page(cache: PrefixCache, partial: PartialPage) -> CacheKey:
    """The key of a pinned page and the prefix before it. O(length)."""
    cache._registry.require(partial.lease)
    tree, size = cache._tree, cache.page_size
    atoms, marks = b"", list[tuple[int, ContentAtom]]()
    for node in tree.path(partial.lease.node):
        begin = tree.start[node] * size
        marks += [(begin + at, atom) for at, atom in tree.content.get(node, ())]
        atoms += tree.edge(node)
    whole = key_of_atoms(atoms, partial.lease.full_key.namespace, tuple(marks))
    return whole.prefix(partial.lease.num_tokens + size)


@guarded
def count_copied(cache: PrefixCache, lease: Lease, num_tokens: int) -> None:
    """Count copied tokens as hits of the lookup that a lease comes from."""
    _, hit_tokens, ideal_tokens, _, _ = lease.lookup_counts
    num_ideal = max(0, hit_tokens + num_tokens - ideal_tokens)
    cache._store.counters.copied(num_tokens, num_ideal)


def _nearest_child(tree: RadixTree, node: int, atoms: bytes, position: int) -> tuple[int, int]:
    """The child of a node whose computed first page shares the most tokens with `atoms[position:]`.

    Returns (0, 0) if none shares a token. `atoms` go on for a token at least behind those shared.
    """
    limit = min(tree.page_bytes, len(atoms) - position) - ATOM_BYTES
    best, num_bytes, child = 0, 0, tree.first_child[node]
    edges, next_sibling, num_wanted = tree.edges, tree.next_sibling, ATOM_BYTES
    wanted = atoms[position : position + num_wanted]
    for _ in range(MAX_VISITED):
        if not child or num_bytes >= limit:
            break
        if (
            edges[child][:num_wanted] == wanted
            and 0 < tree.owned[child] == tree.resident[child]
            and not tree.leader[child]
        ):
            best, num_bytes = child, _num_shared(tree, child, 0, atoms, position) * ATOM_BYTES
            num_wanted = num_bytes + ATOM_BYTES
            wanted = atoms[position : position + num_wanted]
        child = next_sibling[child]
    return best, num_bytes // ATOM_BYTES


def _num_shared(tree: RadixTree, node: int, page: int, atoms: bytes, position: int) -> int:
    """How many tokens of a node's page are `atoms[position:]`; all but one of those at most."""
    limit = min(tree.page_bytes, len(atoms) - position) - ATOM_BYTES
    begin = page * tree.page_bytes
    edge = memoryview(tree.edges[node])[begin : begin + max(0, limit)]
    return shared_pages(atoms, position, edge, ATOM_BYTES)
