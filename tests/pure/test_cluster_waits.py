"""Whoever waits for a peer has an end of it: calls, drains, snapshots and what runs in the background."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from ramify.cluster import wire
from ramify.cluster.codecs import WirePin
from ramify.cluster.connection import Connection
from ramify.cluster.credentials import Credentials
from ramify.cluster.remote_replica import RemoteReplica
from ramify.engine.cache_admin import calls
from ramify.errors import DrainingError, EngineStoppedError, InvalidKeyError
from ramify.params import SamplingParams
from tests.pure.async_bench import AsyncBench
from tests.pure.cluster_bench import ClusterBench, prompts, run, until

pytest.importorskip("grpc", reason="grpcio is not installed (pip install ramify[cluster])")
PROMPT = prompts(1)[0]
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


async def never(body: bytes) -> None:
    """A peer that reads nothing."""
    del body
    await asyncio.Event().wait()


async def messages(*bodies: wire.FromServer, then: asyncio.Event) -> AsyncIterator[bytes]:
    for body in bodies:
        yield wire.encode(body)
    await then.wait()


def test_a_drain_does_not_wait_for_a_server_that_reads_nothing() -> None:
    """It has the time that it is given to read the rest, and no more."""
    bench, is_over = AsyncBench(), asyncio.Event()

    async def main() -> None:
        async with bench.llm:
            connection = Connection(bench.llm, never, "test", lambda *_: None)
            serving = asyncio.ensure_future(connection.run(messages(then=is_over)))
            connection.send(wire.Pong(1))
            async with asyncio.timeout(5.0):
                await connection.end(0.01)
                await serving

    run(main())


def test_a_later_snapshot_takes_the_place_of_an_earlier_one() -> None:
    """A server that has asked again gets one whole snapshot, and not halves of two."""
    bench, is_over = AsyncBench(), asyncio.Event()
    received: list[Any] = []

    async def write(body: bytes) -> None:
        received.append(wire.decode_from_replica(body))

    def parts() -> list[wire.SnapshotPart]:
        return [message for message in received if isinstance(message, wire.SnapshotPart)]

    async def main() -> None:
        async with bench.llm:
            for prompt in prompts(3):
                await bench.llm.generate(prompt, SHORT)
            connection = Connection(bench.llm, write, "test", lambda *_: None)
            requests = messages(wire.TakeSnapshot(1), wire.TakeSnapshot(2), then=is_over)
            serving = asyncio.ensure_future(connection.run(requests))
            await until(lambda: any(part.request == 2 and part.is_last for part in parts()))
            is_over.set()
            await serving

    run(main())

    assert {part.request for part in parts()} == {2}
    assert [part.number for part in parts()] == list(range(len(parts())))
    assert sum(len(run.hashes) for part in parts() for run in part.runs) > 0


def test_a_server_that_comes_during_a_drain_sends_its_requests_elsewhere() -> None:
    """It is told as those are that were connected before: it does not try each request there first."""
    bench = ClusterBench(2)

    async def main() -> None:
        async with bench.running():
            first, replica = bench.members[0], bench.llm.dispatch.replicas["0"]
            first.gate.is_open = False
            other_servers = asyncio.ensure_future(first.llm.generate(PROMPT, SHORT))
            await first.gate.arrive()
            draining = asyncio.ensure_future(first.replica.drain(10.0))
            await until(lambda: replica.is_draining)
            replica.disconnect("the network")
            await until(lambda: replica.welcome is None)
            await until(lambda: replica.welcome is not None and replica.is_draining)
            for prompt in prompts(4):
                assert (await bench.llm.generate(prompt, SHORT)).error is None
            first.gate.open()
            await other_servers
            assert await draining

    run(main())


class Nobody:
    """A `Cluster` that hears nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def test_a_call_whose_answer_is_broken_ends() -> None:
    """Its caller gets an error, and a permit is free again; the connection ends by a bug."""
    pin = WirePin(1, "me", b"\xff\xff\xff\xff", 1, None, 0.0)  # of a negative token

    async def main() -> None:
        cluster: Any = Nobody()
        replica = RemoteReplica("0", 0, "127.0.0.1:1", cluster, Credentials())
        for key, value in enumerate((b"\xc1", msgspec.msgpack.encode(pin))):
            future = asyncio.get_running_loop().create_future()
            await replica._call_permits.acquire()
            replica._calls[key] = calls.PinPrefix([1], "me", 1.0, "", "", 0), future
            with suppress(InvalidKeyError):  # ends the connection
                replica._handle(wire.Return(key, msgspec.Raw(value)))
            with pytest.raises(wire.WireError, match="is broken"):
                await future
        assert replica._call_permits._value == wire.MAX_CALLS

    run(main())


def test_a_bug_of_the_background_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Warming a replica that has joined ends with a line, and requests go on."""
    bench = ClusterBench(1)

    def fail(*_: object) -> Any:
        raise KeyError("a bug")

    async def main() -> None:
        async with bench.running():
            routes: Any = bench.routes
            routes.missing = fail
            bench.llm.dispatch.replicas["0"].disconnect("the network")
            await until(lambda: "warm-up has ended by a bug" in caplog.text)
            await until(lambda: bench.llm.dispatch.members.has_ready)
            assert (await bench.llm.generate(PROMPT, SHORT)).error is None

    with caplog.at_level(logging.ERROR):
        run(main())


def test_the_reason_of_a_bug_is_not_the_end_of_this_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A call that a connection's bug has ended says so."""
    bench = ClusterBench(2)

    async def main() -> None:
        async with bench.running():
            member, replica = bench.members[0], bench.llm.dispatch.replicas["0"]
            member.gate.is_open = False
            bench.llm.dispatch.replicas["1"].is_draining = True
            live = asyncio.ensure_future(bench.llm.generate(PROMPT, SHORT))
            await member.gate.arrive()
            [connection] = member.replica._connections
            bench.llm.dispatch.replicas["1"].is_draining = False
            answer = asyncio.ensure_future(replica.call(calls.ReadStats()))
            await asyncio.sleep(0)
            connection.send(wire.Step(runs=[wire.Run(1 << 40, "stored", b"", b"", b"abc")]))
            with pytest.raises(Exception, match="gone before it answered: a bug here: "):
                await answer
            assert (await live).error is None  # at the other one
            member.gate.open()

    with caplog.at_level(logging.ERROR):
        run(main())


@pytest.mark.parametrize(
    ("close", "error"),
    [("aclose", EngineStoppedError), ("drain", DrainingError)],
)
def test_a_request_that_was_being_prepared_is_refused(close: str, error: type[Exception]) -> None:
    """The client was closed, or drains, while the prompt was tokenised in another thread."""
    bench = ClusterBench(1)

    async def main() -> None:
        async with bench.running():
            may_go_on = asyncio.Event()
            llm: Any = bench.llm
            hashes = llm._page_hashes

            async def slowly(*args: Any) -> Any:
                await may_go_on.wait()
                return await hashes(*args)

            llm._page_hashes = slowly
            answer = asyncio.ensure_future(llm.generate(PROMPT, SHORT))
            await asyncio.sleep(0)
            if close == "drain":
                llm._is_draining = True
            else:
                await llm.aclose()
            may_go_on.set()
            with pytest.raises(error):
                await answer

    run(main())
