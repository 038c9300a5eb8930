"""`KvEventFeed`: the events of an engine's cache, taken between two steps and handed to the sockets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import chain
from typing import Any, Protocol

from ramify.cache.events import SnapshotChunk, Subscription
from ramify.cache.prefix_cache import PrefixCache
from ramify.config import ResolvedConfig
from ramify.engine.serving.streams import LoopDispatcher
from ramify.engine.tier_events import TierEvents
from ramify.errors import EngineStoppedError
from ramify.server.kv_events.form import BatchEncoder
from ramify.server.kv_events.options import KvEventOptions
from ramify.server.kv_events.sockets import Answer, KvEventSockets, Resync

logger = logging.getLogger(__name__)

MAX_EVENTS = 1 << 16  # between two steps; more are lost, and made up for by a snapshot


class HasCache(Protocol):
    """An `EngineCore`, as far as events need it."""

    @property
    def cache(self) -> PrefixCache:
        """The prefix cache."""
        ...

    @property
    def tier_events(self) -> TierEvents | None:
        """What the cache tiers got and lost; None without tiers."""
        ...


class ObservedEngine(Protocol):
    """An engine in this process; `AsyncLLM` is one."""

    @property
    def config(self) -> ResolvedConfig:
        """Sizes of the engine."""
        ...

    def dispatcher(self) -> LoopDispatcher:
        """Of the running event loop."""
        ...

    def observe(self, observer: Any) -> None:
        """Ask for a report between any two steps."""
        ...

    def unobserve(self, observer: Any) -> None:
        """End `observe`."""
        ...

    async def run(self, call: Callable[[Any], Any]) -> Any:
        """Run a call in the engine thread."""
        ...


class KvEventFeed:
    """Publishes what the cache of an engine stores and removes; an `EngineObserver`.

    The engine never waits: what does not fit into the queue of the sockets is dropped and counted, and a
    snapshot takes its place when there is room.

    Args:
        limits: of `KvEventSockets`.
    """

    def __init__(self, llm: ObservedEngine, options: KvEventOptions, **limits: int) -> None:
        self._llm, self._loop = llm, asyncio.get_running_loop()
        self.dispatcher = llm.dispatcher()
        self.wake_scheduled = False
        self.num_dropped = 0  # events
        # For the engine thread only:
        self._subscription: Subscription | None = None
        self._num_lost = 0
        self._publishes_tiers = options.tiers
        self._tier_events: TierEvents | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        encoder = BatchEncoder(options.form, llm.config.page_size)
        self.sockets = KvEventSockets(options, encoder, self._ask_engine, **limits)

    async def start(self) -> None:
        """Publish what is cached, and what changes from now on."""
        await self._llm.run(self._begin)
        self._llm.observe(self)

    async def close(self) -> None:
        """Publish no more."""
        self._llm.unobserve(self)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with suppress(EngineStoppedError):
            await self._llm.run(self._end)
        await asyncio.to_thread(self.sockets.close)

    # -- in the engine thread ----------------------------------------------------------------

    def _begin(self, core: HasCache) -> None:
        subscription = core.cache.subscribe(MAX_EVENTS, with_atoms=True)
        self._subscription = subscription
        if self._publishes_tiers and core.tier_events is not None:
            self._tier_events = core.tier_events
            self._tier_events.open()
        self.sockets.put_snapshot(Resync(self._snapshot(subscription)))

    def _end(self, core: HasCache) -> None:
        del core
        if self._subscription is not None:
            self._subscription.close()
        if self._tier_events is not None:
            self._tier_events.close()

    def _snapshot(self, subscription: Subscription) -> Iterator[SnapshotChunk]:
        """The pool's pages, and those that were announced of the tiers."""
        announced = () if self._tier_events is None else self._tier_events.announced()
        tiers = [SnapshotChunk(0, 0, announced, is_last=False, digest=b"")] if announced else []
        return chain(subscription.snapshot_chunks(), tiers)

    def report(self, core: HasCache, step_s: float | None) -> None:
        """See `EngineObserver`: nothing to deliver to the event loop."""
        del core, step_s
        self._forward()

    def _forward(self) -> None:
        subscription = self._subscription
        assert subscription is not None
        events = subscription.take()
        num_dropped = subscription.num_dropped
        if self._tier_events is not None:
            events += self._tier_events.take()
            num_dropped += self._tier_events.num_dropped
        num_lost = num_dropped - self._num_lost
        if num_lost:
            self._num_lost += num_lost
            self._drop(num_lost)
        if not self.sockets.is_dropping:
            if events and not self.sockets.put(events):
                self._drop(len(events))
            return
        # The snapshot will have them.
        self.num_dropped += len(events)
        if self.sockets.has_room:
            self.sockets.is_dropping = False
            self.sockets.put_snapshot(Resync(self._snapshot(subscription)))

    def _drop(self, num_events: int) -> None:
        if not self.sockets.is_dropping:
            logger.warning("KV events come faster than they are published: some are dropped")
        self.num_dropped += num_events
        self.sockets.begin_dropping()

    def _serve(self, core: HasCache) -> None:
        """What the sockets ask for: a snapshot for clients, or one after drops."""
        del core
        self._forward()
        assert self._subscription is not None
        if self.sockets.has_waiting_clients:
            self.sockets.put_snapshot(Answer(self._snapshot(self._subscription)))

    # -- in other threads --------------------------------------------------------------------

    def _ask_engine(self) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._start_serving)

    def _start_serving(self) -> None:
        async def serve() -> None:
            with suppress(EngineStoppedError):
                await self._llm.run(self._serve)

        task = asyncio.ensure_future(serve())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def receive(self, delivery: object) -> None:
        """See `Receiver`; nothing is delivered."""

    def wake(self) -> None:
        """See `Receiver`."""
        self.wake_scheduled = False


@asynccontextmanager
async def published(
    llm: ObservedEngine, options: KvEventOptions | None, **limits: int
) -> AsyncIterator[KvEventFeed | None]:
    """Publish the events of an engine during the block; None: publish none.

    Raises:
        ConfigError: an endpoint cannot be bound.
    """
    if options is None:
        yield None
        return
    feed = KvEventFeed(llm, options, **limits)
    try:
        await feed.start()
        where, replay = feed.sockets.endpoints
        logger.info("KV events at %s%s", where, f", replay at {replay}" if replay else "")
        if not options.is_local:
            logger.warning(
                "KV events hold the tokens of every prompt, and everybody who reaches %s can read them",
                where,
            )
        yield feed
    finally:
        await feed.close()
