"""`WarmUp`: prompts that a replica which joins later computes before requests ask for them."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from ramify.cluster.remote_replica import RemoteReplica
from ramify.cluster.routes import HotPrompt, Routes
from ramify.engine.cache_admin.calls import PinPublicPrefixes
from ramify.engine.cache_admin.warmup import PUBLIC, WarmPrompt, WarmupResult
from ramify.errors import RamifyError
from ramify.outputs import RequestOutput

logger = logging.getLogger(__name__)

MAX_PROMPTS = 1024  # that are remembered
POOL_SHARE = 0.5  # of a replica's pages, for hot prefixes
KNOWN_S = 10.0  # until the snapshot of a cache has come
CHECK_S = 0.05
IDLE_S = 2.0  # that a hot prefix waits for a moment without requests
Compute = Callable[[WarmPrompt, RemoteReplica], Awaitable[RequestOutput | Exception]]


class WarmUp:
    """Public prefixes, then warm-up prompts, then the prefixes that most requests share.

    The replica takes requests meanwhile. Hot prefixes are computed one after the other, each when the
    replica has no request of this server, or, if it is never without, `IDLE_S` later beside them.

    Args:
        compute: computes a prompt at a replica, with the lowest priority.
    """

    def __init__(self, routes: Routes, compute: Compute) -> None:
        self._routes, self._compute = routes, compute
        self._public: list[array[int]] = []
        self._prompts: deque[WarmPrompt] = deque(maxlen=MAX_PROMPTS)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def remember(self, prompts: Sequence[WarmPrompt]) -> None:
        """Compute these prompts, too, at every replica that joins later."""
        self._prompts += [prompt for prompt in prompts if prompt not in self._prompts]

    def declare_public(self, prefixes: Sequence[Sequence[int]]) -> None:
        """Compute and pin these prefixes, too, at every replica that joins later."""
        arrays = [array("i", ids) for ids in prefixes]
        self._public += [ids for ids in arrays if ids not in self._public]

    def forget_pinned(self, owner: str, token_ids: Sequence[int], salt: str = "") -> None:
        """Neither compute nor pin a prefix at replicas that join later; its pins have ended.

        Args:
            owner: tenant of a prompt with `retention`, or `PUBLIC`.
            salt: of that prompt.
        """
        is_public, ids = owner == PUBLIC, [*token_ids]
        if is_public:
            self._public = [prefix for prefix in self._public if prefix.tolist() != ids]

        def is_forgotten(prompt: WarmPrompt) -> bool:
            # Sharing a prefix has computed it as a prompt of no tenant.
            owned = not prompt.tenant if is_public else prompt.tenant == owner
            owned = owned and prompt.salt == salt
            return owned and bool(prompt.retention) is not is_public and [*prompt.prompt] == ids

        remaining = [prompt for prompt in self._prompts if not is_forgotten(prompt)]
        self._prompts = deque(remaining, maxlen=MAX_PROMPTS)

    def begin(self, replica: RemoteReplica) -> None:
        """A replica has joined; with an empty cache, or with the one of before."""
        self.end(replica)
        self._tasks[replica.name] = asyncio.ensure_future(self._run(replica))

    def end(self, replica: RemoteReplica) -> None:
        """A replica has left."""
        task = self._tasks.pop(replica.name, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """End all that is being computed."""
        tasks, self._tasks = [*self._tasks.values()], {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, replica: RemoteReplica) -> None:
        for part in (self._share, self._compute_prompts, self._compute_hot):
            try:
                await part(replica)
            except RamifyError as error:
                self._log(replica, error)
            except Exception:
                logger.exception(
                    "replica %s: a part of its warm-up has ended by a bug", replica.name
                )

    async def _share(self, replica: RemoteReplica) -> None:
        if not self._public:
            return
        prefixes = [*self._public]
        results = [await self._compute(WarmPrompt(ids.tolist()), replica) for ids in prefixes]
        # Some may have been forgotten meanwhile.
        if remaining := [ids for ids in prefixes if ids in self._public]:
            await replica.call(PinPublicPrefixes(remaining, WarmupResult.of(results)))

    async def _compute_prompts(self, replica: RemoteReplica) -> None:
        for prompt in [*self._prompts]:
            if prompt in self._prompts:  # else it was forgotten meanwhile
                self._log(replica, await self._compute(prompt, replica))

    async def _compute_hot(self, replica: RemoteReplica) -> None:
        if replica.welcome is None:
            return
        max_pages = int(POOL_SHARE * replica.welcome.config.num_pages)
        for _ in range(int(KNOWN_S / CHECK_S)):
            if self._routes.is_known(replica.name):
                break
            await asyncio.sleep(CHECK_S)
        computed: list[HotPrompt] = []
        for prompt in self._routes.missing(replica.name, max_pages):
            await self._until_idle(replica)
            warm = WarmPrompt(prompt.ids.tolist(), prompt.tenant, prompt.salt)
            self._log(replica, await self._compute(warm, replica))
            computed.append(prompt)
        if computed:
            num_tokens = sum(len(prompt.ids) for prompt in computed)
            logger.info(
                "replica %s: warmed %d hot prefixes of %d tokens",
                replica.name,
                len(computed),
                num_tokens,
            )

    async def _until_idle(self, replica: RemoteReplica) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(IDLE_S):
                while replica.requests:  # noqa: ASYNC110 - whoever ends them
                    await asyncio.sleep(CHECK_S)

    def _log(self, replica: RemoteReplica, result: RequestOutput | Exception) -> None:
        error = result if isinstance(result, Exception) else result.error
        if error is not None:
            logger.warning("replica %s: a prompt was not warmed: %s", replica.name, error)
