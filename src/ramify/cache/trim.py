"""Pages that nobody will ask for again go before the policy would choose them."""

from __future__ import annotations

from ramify.cache.ghosts import ASKED
from ramify.cache.key import CacheKey
from ramify.cache.packed import ATOM_BYTES
from ramify.cache.prefix_cache import PrefixCache


def evict_suffix(cache: PrefixCache, key: CacheKey, num_tokens: int) -> int:
    """Evict what is cached of `key` behind the whole pages of its first `num_tokens` tokens.

    Pages that somebody holds, or from which another prompt goes on, stay. Returns how many went.
    Cost: of one lookup.
    """
    tree, store, size = cache._tree, cache._store, cache.page_size  # noqa: SLF001
    root = tree.roots.get(key.namespace)
    if root is None:
        return 0
    page_bytes = size * ATOM_BYTES
    end = len(key.atoms) // page_bytes * page_bytes
    path, part, covered = tree.find(root, key.atoms, end, pending=False)
    if part:
        if covered < tree.resident[part]:  # another prompt goes on from there
            return 0
        path.append(part)
    evicted, now_s = 0, store.clock()
    for node in reversed(path):
        beyond = tree.start[node] + tree.resident[node] - num_tokens // size
        cut = min(tree.resident[node], beyond)
        if cut <= 0 or not store._is_evictable(node):  # noqa: SLF001
            break
        evicted += store._evict_from(node, cut, ASKED, now_s)  # noqa: SLF001
        above = tree.parent[node]
        if tree.resident[node]:
            break
        if store._is_evictable(above) and not store.queue.ticket[above]:  # noqa: SLF001
            store.queue.push(above)
    store.ghosts.trim()
    store.log.notify_observers()
    return evicted
