"""Collect the statistics of a prefix cache from its parts."""

from __future__ import annotations

from ramify.cache.ghosts import REASONS, WITHDRAWN
from ramify.cache.leases import LeaseRegistry
from ramify.cache.node_store import NodeStore
from ramify.cache.pins import PinTable
from ramify.cache.types import CacheStats


def collect_stats(store: NodeStore, registry: LeaseRegistry, pins: PinTable) -> CacheStats:
    """Counters since the cache was made, and how its pages are used now; ends expired pins."""
    pins.expire()
    tree, ledger, counters = store.tree, store.ledger, store.counters
    recent_tokens, recent_hit_tokens = counters.recent
    residency, idle, reuse_gap = counters.histograms
    return CacheStats(
        num_pages=ledger.num_pages,
        page_size=tree.page_size,
        free_pages=ledger.num_free,
        private_pages=ledger.num_private,
        cached_pages=ledger.num_tree,
        evictable_pages=store.num_evictable,
        pinned_pages=pins.num_pages,
        ghost_pages=tree.num_ghost_pages,
        num_nodes=tree.num_nodes - tree.num_ghosts,
        num_leases=len(registry) - len(pins),
        num_sessions=len(store.sessions),
        lookups=counters.lookups,
        lookup_tokens=counters.tokens,
        hit_tokens=counters.hit_tokens,
        ideal_hit_tokens=counters.ideal_tokens,
        recent_tokens=recent_tokens,
        recent_hit_tokens=recent_hit_tokens,
        evicted_pages=sum(counters.evictions),
        evictions=dict(zip(REASONS[:WITHDRAWN], counters.evictions, strict=False)),
        ended_sessions=store.sessions.num_ended,
        residency=residency,
        idle=idle,
        reuse_gap=reuse_gap,
        copied_tokens=counters.copied_tokens,
    )
