"""Sessions of a cache: begin a request in one, end one.

The pages that only one session uses are evicted first when it ends. Pages that others use, or
requests without a session, keep their recency.
"""

# ruff: noqa: SLF001 - these functions are methods of PrefixCache in a file of their own

from __future__ import annotations

from ramify.cache.call_guard import guarded
from ramify.cache.prefix_cache import PrefixCache
from ramify.cache.session_table import Session


@guarded
def open_session(cache: PrefixCache, tenant: str, name: str) -> Session:
    """The session of this name, for `PrefixCache.release`; it is alive from now on.

    Call it once for each request of the session. A session without a request for an hour is
    forgotten, and so is the least recently used one of more than 16,384.
    """
    return cache._store.sessions.open(tenant, name)


@guarded
def end_session(cache: PrefixCache, tenant: str, name: str) -> int | None:
    """End a session: pages that only it uses are evicted before all others.

    Returns how many pages; None if no such session is alive. Requests of it that still run go on, and
    their pages follow when they end. The next request of this name begins a new session.
    """
    return cache._store.sessions.end(tenant, name)
