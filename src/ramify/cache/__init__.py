"""The prefix cache: a radix tree over token pages, with leases, eviction and page ownership.

It imports the standard library, `ramify.errors` and `ramify.outputs` only; every package above but
`kernels` may import it. Other engines use it alone, by the names below (docs/cache-reference.md).

Read in this order:
1. `prefix_cache`: the public calls. `key` (with `content_atoms` for media and salts), `types` and
   `pages`: what they take and return.
2. `tree`, over `packed` and `gc_untracked`: the nodes; `child_index`: the child that begins with a
   page; `hash_index`: pages by hash, in its place; `node_store`: the nodes together with their pages.
3. `leases` and `lease_ops`: what requests hold; `pins`: what operators keep; `window`: release of
   pages outside a sliding window; `partial_page`: a page that a prompt leaves in the middle.
4. `eviction`, `eviction_queue`, `policies`, `adaptive_policy`, `ghosts`: what is evicted, what is remembered;
   `session_table`, `sessions`: whose pages go first.
5. `tiers`, `staging`, `tier_loads`, `tier_costs`, `promotion`: pages outside the pool.
6. `call_guard`: one thread at a time.
7. `counters`, `statistics`, `events`, `explain`, `inspection`, `invariants`, `maintenance`,
   `draft_lookup`.

hatch_build.py compiles the hot path with mypyc: `MODULES` there says which modules, and why not all.
"""

from ramify.cache.content_atoms import Media, Salt
from ramify.cache.events import CacheEvent, Evicted, Snapshot, SnapshotChunk, Subscription
from ramify.cache.hash_index import INDICES
from ramify.cache.key import CacheKey, namespace_of, namespace_parts
from ramify.cache.leases import Lease
from ramify.cache.pages import PageLedger, Pages
from ramify.cache.pins import Pin
from ramify.cache.policies import POLICIES
from ramify.cache.prefix_cache import PrefixCache
from ramify.cache.tree import RadixTree
from ramify.cache.types import CacheStats, Histogram, Match, Node
from ramify.outputs import Explanation

__all__ = [
    "INDICES",
    "POLICIES",
    "CacheEvent",
    "CacheKey",
    "CacheStats",
    "Evicted",
    "Explanation",
    "Histogram",
    "Lease",
    "Match",
    "Media",
    "Node",
    "PageLedger",
    "Pages",
    "Pin",
    "PrefixCache",
    "RadixTree",
    "Salt",
    "Snapshot",
    "SnapshotChunk",
    "Subscription",
    "namespace_of",
    "namespace_parts",
]
