"""KV events for other people's routers: what a subscriber of vLLM's format believes is what is cached."""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from msgspec import Struct
from msgspec.msgpack import Decoder
from typer.testing import CliRunner

from ramify.cache.key import CacheKey
from ramify.cli import app
from ramify.cluster.run_replica import ReplicaOptions, StdoutStages, run_replica
from ramify.engine.core import EngineCore
from ramify.errors import ConfigError
from ramify.params import SamplingParams
from ramify.server.kv_events.feed import KvEventFeed, published
from ramify.server.kv_events.form import EventForm
from ramify.server.kv_events.options import KvEventOptions
from ramify.server.operations.kv_event_metrics import KvEventCollector
from ramify.server.run import ServeInputs, ServeOptions
from tests.pure.async_bench import AsyncBench
from tests.pure.test_prefix_cache import serve

zmq: Any = pytest.importorskip("zmq", reason="pyzmq is not installed (ramify[kv-events])")

ONE = SamplingParams(max_tokens=1, ignore_eos=True)
HERE = "tcp://127.0.0.1:*"
END = (1 << 64) - 1  # sequence of the last answer of a replay
LIMIT_S = 20.0

# -- the format, written down as a reader has it ------------------------------------------------


class StoredMap(Struct, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class RemovedMap(Struct, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None


class ClearedMap(Struct, tag="AllBlocksCleared"):
    pass


class StoredArray(Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None


class RemovedArray(Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[int]


class ClearedArray(Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class MapBatch(Struct, array_like=True):
    ts: float
    events: list[StoredMap | RemovedMap | ClearedMap]
    data_parallel_rank: int | None = None


class ArrayBatch(Struct, array_like=True):
    ts: float
    events: list[StoredArray | RemovedArray | ClearedArray]
    data_parallel_rank: int | None = None


BATCHES: dict[EventForm, type] = {EventForm.map: MapBatch, EventForm.array: ArrayBatch}


class Subscriber:
    """A reader: a SUB socket, and a DEALER socket for what it has missed.

    Args:
        replay: where to ask for missed batches; "": nowhere.
    """

    def __init__(
        self, endpoint: str, replay: str = "", *, form: EventForm = EventForm.map, topic: str = ""
    ) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.connect(endpoint)
        self.socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.replay = replay
        self.decoder: Any = Decoder(BATCHES[form])
        self.has_topic = form is EventForm.map  # in a replay
        self.blocks: dict[int, list[int]] = {}
        self.topics: set[bytes] = set()
        self.last = -1
        self.num_replays = 0

    def close(self) -> None:
        self.context.destroy(linger=0)

    def read(self) -> None:
        """Apply everything that has come."""
        while self.socket.poll(0):
            topic, sequence, body = self.socket.recv_multipart()
            self.topics.add(topic)
            number = int.from_bytes(sequence, "big")
            if number > self.last + 1 and self.replay:
                self.catch_up(self.last + 1)
            if number > self.last:
                self.apply(number, body)

    def catch_up(self, first: int) -> None:
        """Ask for the batches from a sequence on, and apply them."""
        self.num_replays += 1
        asking = self.context.socket(zmq.DEALER)
        asking.connect(self.replay)
        asking.send_multipart([b"", first.to_bytes(8, "big")])
        before = first - 1
        while True:
            assert asking.poll(1000 * LIMIT_S), "no answer"
            delimiter, *topic, sequence, body = asking.recv_multipart()
            assert delimiter == b""
            number = int.from_bytes(sequence, "big")
            if number == END:
                assert body == b""
                break
            assert number > before, "sequences rise"
            assert bool(topic) == self.has_topic
            self.topics.update(topic)
            before = number
            self.apply(number, body)
        asking.close()

    def apply(self, number: int, body: bytes) -> None:
        self.last = max(self.last, number)
        for event in self.decoder.decode(body).events:
            match type(event).__name__.removesuffix("Map").removesuffix("Array"):
                case "Stored":
                    size = event.block_size
                    assert len(event.token_ids) == size * len(event.block_hashes)
                    for at, name in enumerate(event.block_hashes):
                        self.blocks[name] = event.token_ids[at * size : (at + 1) * size]
                case "Removed":
                    for name in event.block_hashes:
                        self.blocks.pop(name, None)
                case _:
                    self.blocks.clear()


def short(page_hash: bytes) -> int:
    return int.from_bytes(page_hash[-8:], "big")


def cached_blocks(core: EngineCore) -> set[int]:
    return {short(name) for run in core.cache.snapshot().runs for name in run.page_hashes}


async def agrees(bench: AsyncBench, subscriber: Subscriber) -> None:
    """Wait until the subscriber believes in exactly the blocks that are cached."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            # In another thread: a replay may need the event loop.
            await asyncio.to_thread(subscriber.read)
            if set(subscriber.blocks) == await bench.llm.run(cached_blocks):
                return
            await asyncio.sleep(0.002)


async def subscribed(feed: KvEventFeed, **options: Any) -> Subscriber:
    """A subscriber that misses nothing from now on: it has joined before the next batch."""
    endpoint, replay = feed.sockets.endpoints
    subscriber = Subscriber(endpoint, replay, **options)
    await asyncio.to_thread(subscriber.catch_up, 0)
    return subscriber


def run(main: Callable[[AsyncBench], Any], **options: Any) -> None:
    """Run a test over an engine, which must have nothing left at the end."""
    bench = AsyncBench(**options)

    async def watched() -> None:
        try:
            await asyncio.wait_for(main(bench), 3 * LIMIT_S)
        finally:
            await bench.llm.aclose()

    asyncio.run(watched())
    bench.assert_nothing_left()


def random_prompt(random: Random) -> list[int]:
    """One of few beginnings, then anything."""
    beginning = [1 + random.randint(0, 2)] * random.choice((4, 8, 20))
    return beginning + [random.randint(1, 40) for _ in range(random.randint(1, 30))]


async def traffic(bench: AsyncBench, random: Random, count: int) -> None:
    """Requests whose pages do not all fit, now and then a clear."""
    for _ in range(count):
        prompts = [random_prompt(random) for _ in range(random.randint(1, 4))]
        await asyncio.gather(*(bench.llm.generate(prompt, ONE) for prompt in prompts))
        if random.random() < 0.1:
            await bench.llm.cache.clear()


@pytest.mark.parametrize("form", EventForm)
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("seed", range(3))
def test_a_subscriber_believes_in_what_is_cached(
    seed: int, window: int | None, form: EventForm
) -> None:
    """After any traffic with evictions and clears, its blocks are the cache's, in both forms."""

    async def main(bench: AsyncBench) -> None:
        random = Random(seed)
        options = KvEventOptions(HERE, HERE, topic="kv@pod@tiny", form=form)
        async with published(bench.llm, options) as feed:
            assert feed is not None
            subscriber = await subscribed(feed, form=form, topic="kv@")
            for _ in range(4):
                await traffic(bench, random, 8)
                await agrees(bench, subscriber)
            assert subscriber.topics == {b"kv@pod@tiny"}
            assert feed.num_dropped == 0
            stats = await bench.llm.stats()
            assert stats.cache.evicted_pages > 0
            subscriber.close()

    run(main, pool_tokens=160, window=window)


def test_blocks_have_the_tokens_of_their_pages() -> None:
    """A block is the last 8 bytes of its page's hash, with that page's tokens; the next one names it."""

    async def main(bench: AsyncBench) -> None:
        async with published(bench.llm, KvEventOptions(HERE, HERE)) as feed:
            assert feed is not None
            subscriber = await subscribed(feed)
            prompt = list(range(1, 18))
            await bench.llm.generate(prompt, ONE)
            await agrees(bench, subscriber)
            base = await bench.llm.run(lambda core: core.namespaces.base)
            names = [short(name) for name in CacheKey(prompt, base).page_hashes(4)]
            assert subscriber.blocks == {
                name: prompt[4 * at : 4 * at + 4] for at, name in enumerate(names)
            }
            subscriber.close()

    run(main)


def test_a_run_names_the_block_before_it() -> None:
    """`parent_block_hash` is the last block before a run, and None for the first of a prompt."""

    async def main(bench: AsyncBench) -> None:
        async with published(bench.llm, KvEventOptions(HERE, HERE)) as feed:
            assert feed is not None
            subscriber = await subscribed(feed)
            stored: list[StoredMap] = []

            def keep(number: int, body: bytes) -> None:
                events = subscriber.decoder.decode(body).events
                stored.extend(event for event in events if isinstance(event, StoredMap))
                Subscriber.apply(subscriber, number, body)

            subscriber.apply = keep  # type: ignore[method-assign]
            for length in (9, 21):
                await bench.llm.generate(list(range(1, length + 1)), ONE)
                await agrees(bench, subscriber)
            before: int | None = None
            for event in stored:
                assert event.parent_block_hash == before
                assert (event.block_size, event.medium, event.lora_id) == (4, "GPU", None)
                before = event.block_hashes[-1]
            assert len(stored) >= 2
            subscriber.close()

    run(main)


def test_who_comes_late_gets_what_was_cached_before() -> None:
    """A subscriber of a full cache, and one that has missed batches, ask for them and agree."""

    async def main(bench: AsyncBench) -> None:
        random = Random(1)
        await traffic(bench, random, 5)
        async with published(bench.llm, KvEventOptions(HERE, HERE)) as feed:
            assert feed is not None
            await traffic(bench, random, 5)
            subscriber = Subscriber(*feed.sockets.endpoints)
            await asyncio.to_thread(subscriber.catch_up, 0)
            await agrees(bench, subscriber)
            # It is away for a while.
            subscriber.socket.close()
            await traffic(bench, random, 5)
            subscriber.socket = subscriber.context.socket(zmq.SUB)
            subscriber.socket.connect(feed.sockets.endpoints[0])
            subscriber.socket.setsockopt_string(zmq.SUBSCRIBE, "")
            before = subscriber.num_replays
            while subscriber.num_replays == before:
                await traffic(bench, random, 1)
                await asyncio.to_thread(subscriber.read)
            await agrees(bench, subscriber)
            subscriber.close()

    run(main, pool_tokens=160)


def test_batches_that_are_too_old_come_as_a_snapshot() -> None:
    """A replay from before all kept batches is the whole cache, under rising sequences."""

    async def main(bench: AsyncBench) -> None:
        random = Random(2)
        async with published(bench.llm, KvEventOptions(HERE, HERE), max_kept=3) as feed:
            assert feed is not None
            for _ in range(3):
                await traffic(bench, random, 6)
                subscriber = await subscribed(feed)
                assert feed.sockets.num_published > 6
                await agrees(bench, subscriber)
                await traffic(bench, random, 6)
                await agrees(bench, subscriber)
                subscriber.close()

    run(main, pool_tokens=160)


def test_what_is_dropped_comes_as_a_snapshot() -> None:
    """With a queue that is too small events are dropped and counted; the subscriber agrees in the end."""

    async def main(bench: AsyncBench) -> None:
        random = Random(3)
        async with published(bench.llm, KvEventOptions(HERE, HERE), max_queued=1) as feed:
            assert feed is not None
            subscriber = await subscribed(feed)

            def burst(core: EngineCore) -> None:
                for at in range(300):
                    serve(core.cache, "".join(random.choices("abc", k=8)), "of its own")
                    if at % 50 == 0:
                        core.cache.clear()
                    feed.report(core, None)

            await bench.llm.run(burst)
            assert feed.num_dropped > 0
            await agrees(bench, subscriber)
            assert feed.sockets.num_snapshots > 1
            counted = {
                metric.name: metric.samples[0].value for metric in KvEventCollector(feed).collect()
            }
            assert counted["ramify_kv_events_dropped"] == feed.num_dropped
            assert counted["ramify_kv_events_snapshots"] == feed.sockets.num_snapshots
            assert counted["ramify_kv_events_batches"] == feed.sockets.num_published
            subscriber.close()

    run(main, pool_tokens=160)


def test_an_engine_that_is_started_again_forgets_what_the_last_one_had() -> None:
    """The first batch of a publisher forgets all blocks, so that none of another engine stays."""
    first, second = AsyncBench(), AsyncBench()

    async def main() -> None:
        async with published(first.llm, KvEventOptions(HERE, HERE)) as feed:
            assert feed is not None
            await first.llm.generate(list(range(1, 30)), ONE)
            subscriber = await subscribed(feed)
            await agrees(first, subscriber)
            assert subscriber.blocks
            endpoint, replay = feed.sockets.endpoints
        async with published(second.llm, KvEventOptions(endpoint, replay)) as feed:
            assert feed is not None
            await second.llm.generate(list(range(5, 20)), ONE)
            async with asyncio.timeout(LIMIT_S):
                while set(subscriber.blocks) != await second.llm.run(cached_blocks):
                    await asyncio.to_thread(subscriber.catch_up, 0)
        subscriber.close()
        await first.llm.aclose()
        await second.llm.aclose()

    asyncio.run(main())


def test_what_is_no_request_for_replay_is_ignored() -> None:
    """Wrong frames are answered by nothing, and change nothing."""

    async def main(bench: AsyncBench) -> None:
        async with published(bench.llm, KvEventOptions(HERE, HERE)) as feed:
            assert feed is not None
            context = zmq.Context()
            stranger = context.socket(zmq.DEALER)
            stranger.connect(feed.sockets.endpoints[1])
            for frames in ([b""], [b"", b"short"], [b"", b"x" * 8, b"more"], [b"y" * 100]):
                stranger.send_multipart(frames)
            subscriber = await subscribed(feed)
            await bench.llm.generate(list(range(1, 30)), ONE)
            await agrees(bench, subscriber)
            assert not stranger.poll(0)
            context.destroy(linger=0)
            subscriber.close()

    run(main)


@pytest.mark.parametrize(
    "endpoint",
    ["", "tcp://", "tcp://host", "http://127.0.0.1:5557", "127.0.0.1:5557", "tcp://a b:1"],
)
def test_an_endpoint_must_be_one_to_bind(endpoint: str) -> None:
    """Anything but tcp://HOST:PORT and ipc://PATH is refused, with the flag and a way out."""
    with pytest.raises(ConfigError, match=r"--kv-events .*give tcp://HOST:PORT"):
        KvEventOptions(endpoint)
    with pytest.raises(ConfigError, match=r"--kv-events-replay .*give tcp://HOST:PORT"):
        KvEventOptions(HERE, endpoint or "nowhere")


def test_a_used_port_is_named() -> None:
    """What is bound already ends the start with the endpoint."""

    async def main(bench: AsyncBench) -> None:
        async with published(bench.llm, KvEventOptions(HERE)) as feed:
            assert feed is not None
            used, replay = feed.sockets.endpoints
            assert replay == ""
            with pytest.raises(ConfigError, match=f"cannot be published at {used}"):
                async with published(bench.llm, KvEventOptions(used)):
                    pass
            for options in (KvEventOptions(used), KvEventOptions(HERE, used)):
                with pytest.raises(ConfigError, match=f"cannot be published at {used}"):
                    options.check_free()
        KvEventOptions(used).check_free()

    run(main)


def test_a_used_port_ends_the_start_before_the_model_loads() -> None:
    """The model does not exist, which would be the error otherwise; both commands look first."""
    pytest.importorskip("grpc", reason="grpcio is not installed (pip install ramify[cluster])")
    with zmq.Context() as context, context.socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        options = KvEventOptions(f"tcp://127.0.0.1:{port}")
        with pytest.raises(ConfigError, match=f"cannot be published at .*{port}"):
            ServeInputs.of(ServeOptions(model="/nowhere/model", port=0, kv_events=options))
        with pytest.raises(ConfigError, match=f"cannot be published at .*{port}"):
            run_replica(ReplicaOptions(model="/nowhere/model", kv_events=options), StdoutStages())


@pytest.mark.parametrize(
    ("endpoint", "is_local"),
    [
        ("tcp://127.0.0.1:5557", True),
        ("tcp://localhost:5557", True),
        ("tcp://[::1]:5557", True),
        ("ipc:///tmp/kv", True),
        ("tcp://*:5557", False),
        ("tcp://10.0.0.1:5557", False),
        ("tcp://[::]:5557", False),
    ],
)
def test_what_others_can_read_is_known(endpoint: str, is_local: bool) -> None:
    """An endpoint beyond this machine is told from one within: the start warns of it."""
    assert KvEventOptions(endpoint).is_local is is_local


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["serve", "nothing", "--kv-events-topic", "kv"], "give --kv-events"),
        (["serve", "nothing", "--kv-events-replay", HERE], "give --kv-events"),
        (["serve", "nothing", "--kv-events-form", "array"], "give --kv-events"),
        (["serve", "nothing", "--kv-events", "nowhere"], "no endpoint"),
        (["serve", "nothing", "--kv-events", HERE, "--replicas", "2"], "ramify replica"),
        (["replica", "nothing", "--kv-events", "nowhere"], "no endpoint"),
    ],
)
def test_wrong_options_end_with_a_line(options: list[str], message: str) -> None:
    """Options that do nothing, or cannot be meant, are errors."""
    result = CliRunner().invoke(app, options)

    assert result.exit_code == 2
    assert message in result.output.replace("\n", " ")
