"""Insert pages whose K/V comes from elsewhere than a forward pass; follow what the cache stores."""

# ruff: noqa: SLF001 - these functions are methods of PrefixCache in a file of their own

from __future__ import annotations

from collections.abc import Callable

from ramify.cache.call_guard import guarded
from ramify.cache.events import EventSink
from ramify.cache.key import CacheKey
from ramify.cache.leases import Lease
from ramify.cache.packed import ATOM_BYTES
from ramify.cache.pages import Pages
from ramify.cache.prefix_cache import PrefixCache


@guarded
def attach_sink(cache: PrefixCache, sink: EventSink) -> Callable[[], None]:
    """Put every event of the cache into a sink as it happens; returns the function that ends this.

    While there is a sink, every published page is hashed. The sink must not call the cache.
    """
    cache._store.log.attach(sink)
    return lambda: cache._store.log.detach(sink)


@guarded
def lease_computed(cache: PrefixCache, key: CacheKey, num_tokens: int) -> Lease:
    """Pin the computed prefix of `key` in the whole pages of its first `num_tokens` tokens.

    Counts no lookup. Release the lease when it has been extended: its new pages then count as used.
    """
    num_pages = min(num_tokens, len(key)) // cache.page_size
    end = num_pages * cache.page_size * ATOM_BYTES
    return cache._lease_ops.pin_prefix(key, end)


@guarded
def publish_copies(
    cache: PrefixCache, lease: Lease, key: CacheKey, packed: bytes
) -> tuple[Lease, bytes]:
    """Publish private pages that hold copies of the K/V of `key` behind the lease.

    Returns the lease on them, and the pages that the tree did not take: another request computes
    those tokens. They stay private.
    """
    before = len(lease.packed_pages)
    lease = cache.publish(lease, key, Pages(packed))
    return lease, packed[len(lease.packed_pages) - before :]
