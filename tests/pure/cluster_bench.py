"""Replicas over fake devices in this process, each behind a real port, and their client."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from ramify.cluster.client import ClusterLLM
from ramify.cluster.credentials import Credentials
from ramify.cluster.replica import Replica
from ramify.cluster.routes import CacheRoutes
from ramify.engine.async_llm import AsyncLLM
from ramify.engine.identity import EngineIdentity
from ramify.errors import CheckpointError
from ramify.testing import fake_next_token
from tests.pure.async_bench import Gate
from tests.pure.engine_bench import VOCAB, Bench
from tests.pure.least_loaded import LeastLoaded

T = TypeVar("T")
PING_S, DEAD_S = 0.05, 10.0


def next_token_of(model: str) -> Callable[[Sequence[int]], int]:
    """What an engine with the weights of `model` answers; another model, another token."""
    shift = sum(model.encode())
    return lambda context: 1 + (fake_next_token(context, VOCAB) + shift) % (VOCAB - 1)


def answer_of(model: str, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The greedy answer of an engine with the weights of `model`."""
    context = list(prompt)
    for _ in range(num_tokens):
        context.append(next_token_of(model)(context))
    return context[len(prompt) :]


class FakeWeights:
    """The weights of a model for a fake device; `LoadedWeights`."""

    def __init__(self, llm: "UpdatableLLM", model: str) -> None:
        self.llm, self.model = llm, model

    def identity(self) -> EngineIdentity:
        return EngineIdentity.of_namespace(self.model.encode(), self.llm.config)

    def __call__(self) -> bytes:
        core: Any = self.llm._engine_thread.core
        core.executor.device.next_token = next_token_of(self.model)
        self.llm._core_identity = self.identity()
        return self.model.encode()


class UpdatableLLM(AsyncLLM):
    """An engine over a fake device, which has the weights of any model but `broken`."""

    async def load_weights(self, model: str | Path) -> FakeWeights:
        if model == "broken":
            raise CheckpointError("the weights of 'broken' cannot be read")
        return FakeWeights(self, str(model))


class Member:
    """A replica over a fake device; it can be held at a step, killed and started again."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.port = 0
        self._make()

    def _make(self) -> None:
        self.bench = Bench(**self.options)
        self.gate = Gate(self.bench.device)
        self.bench.core.executor = self.gate
        self.llm = UpdatableLLM.from_core(self.bench.core)

    async def start(self, credentials: Credentials | None = None) -> None:
        self.replica = Replica(self.llm, credentials)
        self.port = await self.replica.start(port=self.port)

    async def kill(self) -> None:
        """End the port at once, as if the process had died; the engine's requests end, too."""
        server, self.replica._server = self.replica._server, None
        await server.stop(None)
        self.gate.open()  # for the engine thread to end; what it computes goes nowhere
        await self.llm.aclose()

    async def start_again(self, credentials: Credentials | None = None) -> None:
        """Another engine at the same port."""
        self._make()
        await self.start(credentials)

    async def until_idle(self) -> None:
        while await self.llm.run(lambda core: bool(core.live)):  # noqa: ASYNC110 - polls the engine
            await asyncio.sleep(0.001)

    def assert_nothing_left(self) -> None:
        core = self.bench.core
        assert not core.live
        assert not self.llm._engine_thread._collectors
        stats = core.cache.stats()
        assert (stats.num_leases, stats.private_pages) == (0, 0)
        core.cache.check()


class ClusterBench:
    """`llm` over `members`."""

    def __init__(self, num_replicas: int = 3, **options: Any) -> None:
        self.members = [Member(**options) for _ in range(num_replicas)]
        self.routes: LeastLoaded | CacheRoutes = CacheRoutes()

    @asynccontextmanager
    async def running(
        self, credentials: Credentials | None = None, **link_options: Any
    ) -> AsyncIterator["ClusterBench"]:
        """Start everything; at the end nothing of any request may be left."""
        await asyncio.gather(*(member.start(credentials) for member in self.members))
        self.llm = ClusterLLM(
            {str(number): f"127.0.0.1:{member.port}" for number, member in enumerate(self.members)},
            None,
            routes=self.routes,
            credentials=credentials,
            **{"ping_s": PING_S, "dead_s": DEAD_S, **link_options},
        )
        try:
            await self.llm.start(10.0)
            await until(lambda: all(r.is_ready for r in self.llm.dispatch.replicas.values()))
            yield self
            await self.llm._warm_up.close()  # replicas that have joined may still be warmed
            self.assert_nothing_reserved()
        finally:
            await self.llm.aclose()
            for member in self.members:
                member.gate.is_open = True
                member.gate.open()
                await member.replica.close()
                member.assert_nothing_left()

    def assert_nothing_reserved(self) -> None:
        assert self.llm.dispatch.num_live == 0
        assert self.routes.num_reserved == 0
        assert not self.llm.dispatch._places

    def member_of(self, name: str) -> Member:
        return self.members[int(name)]

    def place_of(self, request_id: int) -> Member:
        """The replica that computes a request now."""
        return self.member_of(self.llm.dispatch._places[request_id][0].name)


async def until_warm(llm: ClusterLLM) -> None:
    """Wait until all caches are known and no replica is being warmed: from then on engines do what is asked."""
    tasks = llm._warm_up._tasks
    await until(lambda: all(task.done() for task in tasks.values()))
    await until(lambda: all(state.is_mirrored for state in llm.replicas.states()))


async def until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - whatever changes it
            await asyncio.sleep(0.002)


def run(main: Coroutine[Any, Any, T], limit_s: float = 60.0) -> T:
    """`asyncio.run` with a time limit; no task may be left."""

    async def watched() -> T:
        result = await asyncio.wait_for(main, limit_s)
        # gRPC ends the tasks of closed streams a little later.
        with suppress(TimeoutError):
            await until(lambda: len(asyncio.all_tasks()) == 1, 5.0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, [str(task) for task in left]
        return result

    return asyncio.run(watched())


def prompts(count: int, length: int = 9) -> list[Sequence[int]]:
    """Different prompts."""
    return [[3 + (number * 7 + at * 3) % 40 for at in range(length)] for number in range(count)]
