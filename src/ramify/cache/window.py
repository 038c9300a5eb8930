"""Release of pages outside the window, for models in which every layer has a sliding window.

A query reads the K/V of the last `window` tokens only. A long prompt keeps its whole path in the
tree, since the nodes below hang from it, but the pages before the window can serve others.
"""

# ruff: noqa: SLF001 - these functions are methods of PrefixCache in a file of their own

from __future__ import annotations

from collections.abc import Sequence

from ramify.cache.call_guard import guarded
from ramify.cache.key import CacheKey
from ramify.cache.leases import Lease
from ramify.cache.pages import pack_pages
from ramify.cache.prefix_cache import PrefixCache


@guarded
def release_outside_window(
    cache: PrefixCache, leases: Sequence[Lease], num_computed: Sequence[int]
) -> int:
    """Free the pages of leases that no later query of their requests reads; returns how many.

    In `Lease.pages` their ids become `cache.num_pages`: a page that the storage must have and that
    queries may read, but whose keys their masks hide. The tree keeps the nodes; a lookup that would
    have to read a released page stops before it. Publishing the tokens again restores their pages.

    A page that another lease holds stays: that of a pin, a fork, or a lease not in `leases`.

    Args:
        leases: live leases.
        num_computed: for each, the tokens whose K/V its request has computed and committed.

    Raises:
        LeaseError: a lease is not live, or named twice; nothing was released.

    Cost: O(nodes above the leases); nothing without a window.
    """
    num_pages = cache._lease_ops.release_outside_window(leases, num_computed)
    cache._store.log.notify_observers()
    return num_pages


@guarded
def count_outside_window(
    cache: PrefixCache, leases: Sequence[Lease], num_computed: Sequence[int]
) -> int:
    """How many pages `release_outside_window` would free."""
    tree = cache._tree
    heads = cache._lease_ops.heads_outside_window(leases, num_computed)
    return sum(count - (tree.resident[node] - tree.owned[node]) for node, count in heads.items())


def has_next_page(cache: PrefixCache, lease: Lease, key: CacheKey) -> bool:
    """Whether the tree has the page of `key` after a lease: `announce` would then announce nothing."""
    return cache._lease_ops.has_next_page(lease, key)


def is_readable(cache: PrefixCache, pages: Sequence[int], num_tokens: int) -> bool:
    """Whether all pages that queries from position `num_tokens` on read or write are still owned.

    Args:
        pages: of a request, in order.
    """
    return cache._lease_ops.is_readable(pack_pages(pages), num_tokens)
