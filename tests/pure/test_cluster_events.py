"""What a server is told of the caches of its replicas: all of it, in order, and what it adds up to."""

import asyncio
import random
from collections.abc import Sequence

import numpy as np
import pytest

from ramify.cache.events import CacheEvent, SnapshotChunk
from ramify.cache.key import split_hashes
from ramify.cluster.mirrors import Mirrors
from ramify.cluster.router import FIRST_OUTPUT_TOKENS, SMOOTHING
from ramify.cluster.routes import CacheRoutes
from ramify.cluster.step_reports import (
    HASH_BYTES,
    PART_HASH_BYTES,
    StepReporter,
    parts_of,
    run_of,
    smoothed,
)
from ramify.cluster.wire import (
    MAX_MESSAGE_BYTES,
    Load,
    Run,
    SnapshotPart,
    TakeSnapshot,
    encode,
)
from ramify.engine.core import EngineCore
from ramify.engine.serving.streams import LoopDispatcher
from ramify.params import SamplingParams
from tests.pure.cluster_bench import ClusterBench, prompts, run, until
from tests.pure.engine_bench import Bench
from tests.pure.least_loaded import LeastLoaded

pytest.importorskip("grpc", reason="grpcio is not installed (pip install ramify[cluster])")
ONE = SamplingParams(max_tokens=1, ignore_eos=True)


class Listening(LeastLoaded):
    """Keeps what it is told; asks for one snapshot."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[Run] = []
        self.parts: list[SnapshotPart] = []
        self.loads: list[Load] = []
        self.digests: list[tuple[int, bytes]] = []
        self.sequence_at_part = -1
        self.is_asked = False

    def load(self, replica: str, load: Load) -> None:
        self.loads.append(load)

    def apply(self, replica: str, incarnation: int, runs: Sequence[Run], num_lost: int) -> None:
        assert num_lost == 0
        self.runs += runs

    def snapshot(self, replica: str, incarnation: int, part: SnapshotPart) -> None:
        self.parts.append(part)
        self.sequence_at_part = self.runs[-1].sequence if self.runs else 0

    def digest(self, replica: str, incarnation: int, sequence: int, digest: bytes) -> None:
        assert not self.runs or self.runs[-1].sequence == sequence
        self.digests.append((sequence, digest))

    def due_snapshots(self, now: float) -> Sequence[tuple[str, TakeSnapshot]]:
        if self.is_asked or len(self.runs) < 5:
            return ()
        self.is_asked = True
        return [("0", TakeSnapshot(7))]


def event_of(run: Run) -> CacheEvent:
    """The event of `run_of`; its page ids are those of the replica and stay there."""
    return CacheEvent(
        run.sequence,
        run.kind,
        run.namespace_hash,
        run.parent_hash,
        run.start,
        run.hashes,
        reason=run.reason,
    )


def chunk_of(part: SnapshotPart) -> SnapshotChunk:
    """The chunk of a part."""
    runs = tuple(map(event_of, part.runs))
    return SnapshotChunk(part.sequence, part.number, runs, part.is_last, part.digest)


def hashes_and_digest(core: EngineCore) -> tuple[set[bytes], bytes]:
    snapshot = core.cache.snapshot()
    return {h for event in snapshot.runs for h in event.page_hashes}, snapshot.digest


def test_events_load_and_snapshots_arrive() -> None:
    """Runs without a gap, the engine's digest, a snapshot behind its events, and a load that ends at 0."""
    bench = ClusterBench(1)
    routes = bench.routes = Listening()

    async def main() -> None:
        async with bench.running():
            for prompt in prompts(12, 18):
                await bench.llm.generate(prompt, ONE)
            await bench.llm.cache.clear(tenant="")
            await bench.llm.generate(prompts(1, 18)[0], ONE)
            await until(lambda: bool(routes.parts) and routes.loads[-1].num_running == 0)
            hashes, digest = await bench.members[0].llm.run(hashes_and_digest)
            await until(lambda: routes.digests[-1][1] == digest)

            assert [entry.sequence for entry in routes.runs] == [
                *range(routes.runs[0].sequence, routes.runs[0].sequence + len(routes.runs))
            ]
            stored: set[bytes] = set()
            for entry in routes.runs:
                event = event_of(entry)
                if event.kind == "stored":
                    stored |= set(event.page_hashes)
                elif event.kind == "removed":
                    stored -= set(event.page_hashes)
            assert stored == hashes
            assert [part.request for part in routes.parts] == [7]
            assert routes.parts[0].is_last
            assert routes.sequence_at_part >= routes.parts[0].sequence
            assert {entry.start for entry in routes.runs if entry.kind == "stored"} == {0}
            assert routes.loads[-1].tokens_waiting == 0
            assert routes.loads[-1].token_s > 0

    run(main())


def test_a_prompt_has_the_page_hashes_of_its_replica() -> None:
    """The server hashes a prompt as the replica does: what it looks up is what was stored."""
    bench = ClusterBench(1)
    routes = bench.routes = Listening()
    looked_up: list[list[bytes]] = []
    choose = routes.choose

    def remember(page_hashes, num_tokens, **others):
        [hashes] = page_hashes
        looked_up.append(split_hashes(hashes))
        return choose(page_hashes, num_tokens, **others)

    routes.choose = remember  # type: ignore[method-assign]

    async def main() -> None:
        async with bench.running():
            for tenant, salt in (("", ""), ("a", ""), ("a", "s")):
                stream = bench.llm.stream(prompts(1, 18)[0], ONE, tenant=tenant, salt=salt)
                await stream.whole()
                await until(lambda: routes.loads[-1].num_running == 0 and bool(routes.runs))
                stored = {h for entry in routes.runs for h in event_of(entry).page_hashes}
                assert set(looked_up[-1]) <= stored
                assert len(looked_up[-1]) == 4

    run(main())


def test_an_event_is_the_same_after_the_journey() -> None:
    """Only page ids stay behind."""
    bench = ClusterBench(1).members[0].bench
    subscription = bench.core.cache.subscribe(100)
    bench.core.add_request([*range(3, 20)], ONE)
    while bench.core.has_unfinished:
        bench.core.step()

    for event in subscription.take():
        arrived = event_of(run_of(event))
        assert (arrived.sequence, arrived.kind, arrived.hashes) == (
            event.sequence,
            event.kind,
            event.hashes,
        )
        assert (arrived.namespace_hash, arrived.parent_hash, arrived.start) == (
            event.namespace_hash,
            event.parent_hash,
            event.start,
        )
    for chunk in subscription.snapshot_chunks():
        [part] = parts_of(3, chunk, chunk.number)
        arrived_chunk = chunk_of(part)
        assert (arrived_chunk.sequence, arrived_chunk.digest) == (chunk.sequence, chunk.digest)


def test_a_snapshot_of_long_runs_fits_into_messages() -> None:
    """A chunk of any size travels in parts below the limit, and the mirror has all of it."""
    step, rng = PART_HASH_BYTES // HASH_BYTES, random.Random(3)
    lengths = (step + 5, 3, step + 1, step - 1, 7)
    runs = [
        CacheEvent(9, "stored", b"n" * 16, b"n" * 16, 0, rng.randbytes(length * HASH_BYTES))
        for length in lengths
    ]
    pages = np.frombuffer(b"".join(run.hashes for run in runs), np.uint64).reshape(-1, 2)
    digest = np.bitwise_xor.reduce(pages).tobytes()
    mirrors, number = Mirrors(stride=8), 0
    mirrors.add("a", 1)
    [request] = mirrors.due_snapshots(0.0)
    for at, is_last in enumerate((False, True)):
        chunk = SnapshotChunk(9, at, tuple(runs[3 * at : 3 * at + 3]), is_last, digest)
        for part in parts_of(request.number, chunk, number):
            assert len(encode(part)) < MAX_MESSAGE_BYTES / 2
            assert part.number == number
            mirrors.snapshot("a", 1, request.number, part)
            number += 1

    assert mirrors.is_known("a")
    assert mirrors.counters.num_failed_snapshots == 0
    assert mirrors.num_pages("a") == sum(length // 8 for length in lengths)
    last = runs[3].hashes
    assert mirrors.match(last) == {"a": len(last) // HASH_BYTES // 8 * 8}
    assert number > 2


def test_a_conversation_stays_with_its_cache() -> None:
    """The second turn goes where the first was computed, and hits there; mirrors equal the caches."""
    bench = ClusterBench(3)
    routes = bench.routes
    assert isinstance(routes, CacheRoutes)

    async def main() -> None:
        async with bench.running():
            stems = prompts(9, 40)
            await asyncio.gather(*(bench.llm.generate(stem, ONE) for stem in stems))
            assert all(member.bench.core.num_steps for member in bench.members)
            await until_mirrored(bench)
            num_read = 0
            for stem in stems:
                output = await bench.llm.generate([*stem, 1, 2, 3], ONE)
                assert output.cache.read_tokens in (0, 40)
                num_read += output.cache.read_tokens
            # Steps of fake devices differ in length: a faster one may be worth computing anew.
            assert num_read >= 5 * 40
            counters = routes.router.counters
            assert counters.predicted_tokens == counters.cached_tokens == num_read
            assert counters.wrong_tokens == 0
            assert routes.num_reserved == 0

    run(main())


def test_several_answers_count_with_their_mean() -> None:
    """The router expects of a request what one answer has: a replica reports each as a request."""
    bench = ClusterBench(1)
    routes = bench.routes
    assert isinstance(routes, CacheRoutes)

    async def main() -> None:
        async with bench.running():
            params = SamplingParams(n=2, max_tokens=4, ignore_eos=True, temperature=1.0)
            await bench.llm.generate(prompts(1)[0], params)
            changed = SMOOTHING * (4 - FIRST_OUTPUT_TOKENS)
            assert routes.router._output_tokens == FIRST_OUTPUT_TOKENS + changed

    run(main())


async def until_mirrored(bench: ClusterBench) -> None:
    """Wait until every mirror has the digest of its replica's cache."""
    assert isinstance(bench.routes, CacheRoutes)
    mirrors = bench.routes.router.mirrors
    for name, member in zip(bench.llm.dispatch.replicas, bench.members, strict=True):
        _, digest = await member.llm.run(hashes_and_digest)
        own = mirrors._mirrors[name]
        await until(lambda own=own, digest=digest: own.digest.to_bytes(16, "big") == digest)  # type: ignore[misc]
        await until(lambda name=name: mirrors.is_known(name))  # type: ignore[misc]


def test_mirrors_follow_a_restart() -> None:
    """After a replica's restart nothing of its old cache counts, and its new cache is known."""
    bench = ClusterBench(2)

    async def main() -> None:
        async with bench.running():
            for stem in prompts(8, 24):
                await bench.llm.generate(stem, ONE)
            await until_mirrored(bench)
            await bench.members[0].kill()
            await bench.members[0].start_again()
            await until(lambda: bench.llm.dispatch.replicas["0"].is_ready)
            await until_mirrored(bench)
            for stem in prompts(8, 24):
                await bench.llm.generate(stem, ONE)
            await until_mirrored(bench)

    run(main())


def test_a_step_in_which_a_replica_was_stopped_is_forgotten_soon() -> None:
    """One step of a thousand times the mean looks a third slower; a slower machine is believed in time."""
    mean = smoothed(0.0, 1e-4)

    assert smoothed(mean, 0.1) == pytest.approx(1.3e-4)
    for _ in range(40):
        mean = smoothed(mean, 1e-3)
    assert mean == pytest.approx(1e-3, rel=0.1)
    for _ in range(60):
        mean = smoothed(mean, 1e-4)
    assert mean == pytest.approx(1e-4, rel=0.1)


def test_a_later_connection_measures_its_own_steps() -> None:
    """What was computed before a server came is no work of the first step that it sees."""
    core, step_s = Bench().core, 0.25
    for prompt in prompts(20, 18):
        core.add_request(prompt, ONE)
    while core.has_unfinished:
        core.step()
    loop = asyncio.new_event_loop()
    reporter = StepReporter(LoopDispatcher(loop), lambda report: None)
    loop.close()
    reporter.report(core, None)
    core.add_request([7] * 18, ONE)
    before = core.num_computed_tokens
    core.step()

    report = reporter.report(core, step_s)

    assert report is not None
    assert report.load.token_s == step_s / (core.num_computed_tokens - before)
