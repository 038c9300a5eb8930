"""`SessionTable`: which nodes belong to which session, so that an ended one's are evicted first.

A node belongs to a session as long as no request of another session, or of none, has used it:
`tree.session` has the session's number, 0 for a node that several sessions or none have used, and
`SESSION_ENDED` for a node whose session has ended, until it is used again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from itertools import count
from typing import Final

from ramify.cache.eviction_queue import EvictionQueue
from ramify.cache.tree import SESSION_ENDED, RadixTree

MAX_SESSIONS: Final = 16384  # 370 bytes each, with one branch
IDLE_S: Final = 3600.0  # a session without a request for this long is forgotten
MAX_BRANCHES: Final = 16  # of a session; the nodes of older branches keep their recency


class Session:
    """A session of a tenant; its requests hold it until they end."""

    __slots__ = ("branches", "is_ended", "name", "number", "used_s")

    def __init__(self, number: int, name: bytes) -> None:
        self.number: Final = number
        self.name: Final = name  # a digest of tenant and name
        self.used_s = 0.0  # when its last request began or ended
        self.is_ended = False
        # Last nodes of its prompts: its nodes are these, and nodes above them.
        self.branches: list[int] = []

    def __repr__(self) -> str:
        return f"Session(number={self.number}, is_ended={self.is_ended})"


class SessionTable:
    """The sessions of a cache that are alive: at most `MAX_SESSIONS`, none idle for `IDLE_S`.

    A forgotten session has no effect: its pages have the recency that they have in any case.
    """

    def __init__(self, tree: RadixTree, queue: EvictionQueue, clock: Callable[[], float]) -> None:
        self._tree, self._queue, self._clock = tree, queue, clock
        self._alive: OrderedDict[bytes, Session] = OrderedDict()  # least recently used first
        self._by_number: dict[int, Session] = {}  # those alive
        self._numbers = count(1)
        self.is_used = False  # whether there has been a session
        self.num_ended = 0  # since the cache was made

    def __len__(self) -> int:
        self.expire()
        return len(self._alive)

    def open(self, tenant: str, name: str) -> Session:
        """The session of this name, alive from now on; a request begins in it."""
        self.is_used = True
        digest = _digest(tenant, name)
        session = self._alive.get(digest)
        if session is None:
            session = Session(next(self._numbers), digest)
            self._alive[digest] = self._by_number[session.number] = session
        self._touch(session)
        self.expire()
        return session

    def expire(self) -> None:
        """Forget sessions that are idle, and the least recently used ones of too many."""
        oldest_s = self._clock() - IDLE_S
        while self._alive:
            session = next(iter(self._alive.values()))
            if len(self._alive) <= MAX_SESSIONS and session.used_s >= oldest_s:
                break
            self._drop(session)
            session.branches = []

    def end(self, tenant: str, name: str) -> int | None:
        """End a session: its nodes are evicted before all others; returns how many pages.

        The nodes of its running requests follow when these end. None: there is no such session.
        """
        session = self._alive.get(_digest(tenant, name))
        if session is None:
            return None
        self._drop(session)
        session.is_ended = True
        self.num_ended += 1
        return self._hasten(session)

    def claim(self, node: int, session: Session | None) -> None:
        """Note that a request of a session, or of none, has used a node and those above it.

        Call it before the release that refreshes recency, while the nodes have a reference.
        """
        tree, number = self._tree, 0 if session is None else session.number
        owner, last_access, parent = tree.session, tree.last_access, tree.parent
        own, at = list[int](), node
        while above := parent[at]:
            if not last_access[at] or owner[at] == SESSION_ENDED:
                owner[at] = number
            elif owner[at] != number:
                owner[at] = 0
            if number and owner[at] == number:
                own.append(at)
            at = above
        if session is None or not (session.is_ended or self.is_alive(number)):
            return
        if own:
            others = [at for at in session.branches if owner[at] == number and at not in own]
            session.branches = [*others[1 - MAX_BRANCHES :], own[0]]
        if session.is_ended:  # while this request ran
            self._hasten(session)
        else:
            self._touch(session)

    def forget(self, node: int) -> None:
        """The node of a session is about to leave the tree: its branch ends above it."""
        session, above = self._by_number.get(self._tree.session[node]), self._tree.parent[node]
        if session is not None and node in session.branches:
            session.branches.remove(node)
            if self._tree.session[above] == session.number:
                session.branches.append(above)

    def is_alive(self, number: int) -> bool:
        """Whether a session has this number."""
        return number in self._by_number

    def adopt(self, other: SessionTable) -> None:
        """Take over the sessions of another cache, which own no node of this one."""
        self._alive, self._by_number, self._numbers = other._alive, other._by_number, other._numbers
        self.is_used, self.num_ended = other.is_used, other.num_ended
        for session in self._alive.values():
            session.branches = []

    def _touch(self, session: Session) -> None:
        session.used_s = self._clock()
        self._alive.move_to_end(session.name)

    def _drop(self, session: Session) -> None:
        # In this order: what an interrupt leaves is a session that owns nothing, until it is dropped.
        self._by_number.pop(session.number, None)
        del self._alive[session.name]

    def _hasten(self, session: Session) -> int:
        """Put the nodes of an ended session first in the order of eviction; returns how many pages."""
        tree, queue, num_pages = self._tree, self._queue, 0
        for node in session.branches:
            while tree.session[node] == session.number:
                tree.session[node] = SESSION_ENDED
                num_pages += tree.owned[node]
                if queue.ticket[node]:
                    queue.remove(node)
                    queue.push(node)
                node = tree.parent[node]  # noqa: PLW2901 - walks up
        session.branches = []
        return num_pages


def _digest(tenant: str, name: str) -> bytes:
    """A name of fixed length; tenants have different ones."""
    text = f"{len(tenant)}:{tenant}{name}"
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
