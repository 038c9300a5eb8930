"""Whatever bytes come: a stream may end, nothing else does, and nothing large is made of little."""

import asyncio
import random
import resource
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import pytest

from ramify.cluster import wire
from ramify.cluster.codecs import encode_error, encode_params
from ramify.cluster.connection import Connection
from ramify.engine.cache_admin import calls
from ramify.errors import InvalidParamsError
from ramify.outputs import CacheReport, FinishReason, RequestMetrics
from ramify.params import SamplingParams, StructuredOutput
from tests.pure.async_bench import AsyncBench
from tests.pure.cluster_bench import ClusterBench, prompts, run
from tests.pure.engine_bench import expected

pytest.importorskip("grpc", reason="grpcio is not installed (pip install ramify[cluster])")
FAST, WHOLE = 10_000, pytest.param(100_000, marks=pytest.mark.slow)
# By which the process may grow, whatever short messages say of lengths.
MAX_BYTES = 128 << 20
PARAMS = SamplingParams(max_tokens=3, logit_bias={3: 1.5}, stop=["a", "b"], seed=4)
FROM_SERVER = [
    wire.Hello(wire.PROTOCOL_VERSION, 4, "ab"),
    wire.Add(1, wire.pack_ids([3, 4, 5]), encode_params(PARAMS), generated=[b"1234"]),
    wire.Add(
        2,
        wire.pack_ids([3] * 40),
        encode_params(SamplingParams(structured=StructuredOutput(regex="a+"))),
        wire.AddOptions(1, "a", "s", 5, True, [(8, 1.0), (4, None)], 0.5, 0.5),
    ),
    wire.Abort(1, True),
    *(
        wire.Call(3, call)
        for call in (
            calls.ReadTree(5),
            calls.ExplainToTenant([1, 2], "a"),
            calls.EvictAnswers([1, 2], [[3]], 1),
            calls.PinPrefix([1, 2, 3, 4], "me", 1.0, "", "", 0),
            calls.ClearCache([1]),
            calls.ReadCacheStats(),
        )
    ),
    wire.Ping(9),
    wire.TakeSnapshot(2),
    wire.ReplaceWeights(5, "model"),
]
END = wire.End(
    [FinishReason.STOP], ["a"], RequestMetrics(0.0, None, 0.0, None), CacheReport(1, 2, 3)
)
FROM_REPLICA = [
    wire.Refused("no"),
    wire.Step(
        [wire.Output(1, [1], "a", end=END)],
        [1],
        [(2, encode_error(InvalidParamsError("n", 0, "more")))],
        wire.Load(1, 2, 3, 4, 0.1, 0.1),
        [wire.Run(1, "stored", b"n" * 16, b"n" * 16, b"h" * 32)],
        1,
        (1, b"d" * 16),
    ),
    wire.Return(3),
    wire.Pong(1),
    wire.SnapshotPart(1, 2, 0, [wire.Run(1, "stored", b"", b"", b"")], True, b""),
    wire.Draining(1.0, True),
]
# Lengths of arrays, maps, texts and bytes that no message of this size has.
GREEDY = [
    head + length
    for head in (b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9")
    for length in (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x01\x00\x00\x00")
]


def bodies(rng: random.Random, messages: list[Any], count: int) -> Iterator[bytes]:
    """Random bytes, and messages with bytes replaced, left out, doubled, cut off or greedy lengths."""
    samples = [wire.encode(message) for message in messages]
    for _ in range(count):
        kind = rng.randrange(10)
        if kind == 0:
            yield rng.randbytes(rng.randrange(60))
            continue
        body = bytearray(rng.choice(samples))
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(body))
            if kind < 6:
                body[at] = rng.randrange(256)
            elif kind == 6:
                del body[at : at + rng.randrange(1, 4)]
                body = body or bytearray(b"\x00")
            elif kind == 7:
                body[at:at] = body[: rng.randrange(1, 9)]
            elif kind == 8:
                body[at : at + 5] = rng.choice(GREEDY)
            else:
                body = body[: at + 1]
        yield bytes(body)


@pytest.mark.parametrize("count", [FAST, WHOLE])
def test_no_message_is_a_crash_or_a_large_allocation(count: int) -> None:
    """Both decoders raise WireError and nothing else; a claimed length allocates nothing."""
    rng, num_refused, most = random.Random(4), 0, 0
    tracemalloc.start()
    try:
        for messages, decode in (
            (FROM_SERVER, wire.decode_from_server),
            (FROM_REPLICA, wire.decode_from_replica),
        ):
            for body in bodies(rng, messages, count // 2):
                tracemalloc.reset_peak()
                before, _ = tracemalloc.get_traced_memory()
                try:
                    decode(body)
                except wire.WireError:
                    num_refused += 1
                most = max(most, tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()

    assert count // 4 < num_refused < count
    assert most < 1 << 20


def test_nested_arrays_are_refused() -> None:
    """However deep."""
    for depth in (100, 100_000):
        with pytest.raises(wire.WireError):
            wire.decode_from_server(b"\x91" * depth)


@pytest.mark.parametrize("count", [1_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_no_message_ends_more_than_its_connection(count: int) -> None:
    """Damaged messages, one connection after the other: the engine goes on, and nothing of them is left."""
    bench, rng = AsyncBench(max_num_seqs=8, options={"max_waiting": 64}), random.Random(5)
    endings = {"broken": 0, "failed": 0, "read": 0}
    stream = bodies(rng, FROM_SERVER[1:], count)
    left = count

    async def some() -> AsyncIterator[bytes]:
        nonlocal left
        for _ in range(50):
            body = next(stream, None)
            if body is None:
                return
            left -= 1
            yield body
            await asyncio.sleep(0)

    async def write(body: bytes) -> None:
        assert len(body) <= wire.MAX_MESSAGE_BYTES

    async def main() -> None:
        async with bench.llm:
            while left:
                connection = Connection(bench.llm, write, "fuzz", lambda *_: None)
                try:
                    await connection.run(some())
                except wire.WireError:
                    endings["broken"] += 1
                else:
                    endings["failed" if connection.failure else "read"] += 1
                assert connection.failure is None or "a bug" not in connection.failure
            output = await bench.llm.generate(prompts(1)[0], SamplingParams(max_tokens=4))
            assert list(output.token_ids) == expected(prompts(1)[0], 4)
            assert bench.llm.health().is_alive
            await bench.llm.cache.end_pins("me")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(main(), 600.0)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert endings["broken"] > count // 100
    assert grown_kib << 10 < MAX_BYTES
    bench.assert_nothing_left()


@pytest.mark.parametrize("count", [100, pytest.param(2_000, marks=pytest.mark.slow)])
def test_random_bytes_on_the_port_end_their_connection_only(count: int) -> None:
    """Bytes that are no HTTP/2, or begin as it does: a server that is connected notices nothing."""
    bench, rng = ClusterBench(1), random.Random(6)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"

    async def main() -> None:
        async with bench.running():
            for _ in range(count):
                body = preface * rng.randrange(2) + rng.randbytes(rng.randrange(1, 3000))
                reader, writer = await asyncio.open_connection("127.0.0.1", bench.members[0].port)
                with suppress(ConnectionError):
                    writer.write(body)
                    await writer.drain()
                    async with asyncio.timeout(0.02):
                        with suppress(TimeoutError):
                            await reader.read(100)
                writer.close()
                with suppress(ConnectionError):
                    await writer.wait_closed()
            output = await bench.llm.generate(
                prompts(1)[0], SamplingParams(max_tokens=4, ignore_eos=True)
            )
            assert list(output.token_ids) == expected(prompts(1)[0], 4, ends=())
            assert bench.llm.dispatch.num_reroutes == 0

    run(main(), 300.0)
