"""Wrong, broken, silent and slow peers: each ends alone, and the replica stays up for the others."""

import asyncio
import logging
from contextlib import suppress
from typing import Any, Self

import pytest

from ramify.cluster import wire
from ramify.cluster.client import ClusterLLM
from ramify.cluster.credentials import Credentials, import_grpc
from ramify.cluster.link import CHANNEL_OPTIONS
from ramify.cluster.replica import Replica
from ramify.engine.cache_admin.calls import ReadStats
from ramify.errors import ConfigError, NoReplicaError, ReplicaLostError
from ramify.params import SamplingParams
from tests.pure.cluster_bench import ClusterBench, Member, prompts, run, until
from tests.pure.engine_bench import expected
from tests.pure.least_loaded import LeastLoaded

grpc = pytest.importorskip("grpc", reason="grpcio is not installed (pip install ramify[cluster])")
PROMPT = prompts(1)[0]
SECRET = "0123456789abcdef0123"


class RawPeer:
    """A connection that sends whatever it is told."""

    def __init__(self, port: int, options: Any = CHANNEL_OPTIONS) -> None:
        self.channel = import_grpc().aio.insecure_channel(f"127.0.0.1:{port}", options=options)
        self.call = self.channel.stream_stream(wire.METHOD)()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.call.cancel()
        await self.channel.close()

    async def hello(self, **fields: Any) -> Any:
        given: Any = {"protocol_version": wire.PROTOCOL_VERSION} | fields
        await self.call.write(wire.encode(wire.Hello(**given)))
        return await self.receive()

    async def receive(self) -> Any:
        body = await self.call.read()
        return None if body is grpc.aio.EOF else wire.decode_from_replica(body)

    async def status(self) -> tuple[str, str]:
        """How the replica has ended the stream."""
        try:
            while await self.call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code().name, error.details()
        return (await self.call.code()).name, await self.call.details()


async def assert_serves(bench: ClusterBench) -> None:
    output = await bench.llm.generate(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True))
    assert list(output.token_ids) == expected(PROMPT, 4, ends=())


def test_a_broken_message_ends_its_stream_only() -> None:
    """Each kind of broken message ends that connection with its reason; it is counted."""
    bench = ClusterBench(1)
    add = wire.Add(5, wire.pack_ids([3, 4]), {"max_tokens": 3})

    async def main() -> None:
        async with bench.running():
            replica, port = bench.members[0].replica, bench.members[0].port
            for number, (bodies, reason) in enumerate(
                (
                    ([b"\xc1"], "is broken"),
                    ([wire.encode(wire.Hello(wire.PROTOCOL_VERSION))], "a second Hello"),
                    ([wire.encode(add), wire.encode(add)], "request 5 comes after 5"),
                    ([wire.encode(wire.Add(1, b"12345", {}))], "5 bytes"),
                ),
                1,
            ):
                async with RawPeer(port) as peer:
                    assert isinstance(await peer.hello(), wire.Welcome)
                    for body in bodies:
                        await peer.call.write(body)
                    code, details = await peer.status()
                    assert code == "INVALID_ARGUMENT"
                    assert reason in details
                assert replica.num_broken == number
            async with RawPeer(port) as peer:
                await peer.call.write(wire.encode(wire.Ping(1)))
                assert "not a Hello" in (await peer.status())[1]
            async with RawPeer(port) as peer:
                await peer.call.write(b"")
                assert (await peer.status())[0] == "INVALID_ARGUMENT"
            await assert_serves(bench)

    run(main())


def test_a_message_beyond_the_limit_ends_its_stream_only() -> None:
    """A peer that does not check its size is cut off before anything of it is decoded."""
    bench = ClusterBench(1)

    async def main() -> None:
        async with bench.running():
            options = [option for option in CHANNEL_OPTIONS if "message_length" not in option[0]]
            replica, port = bench.members[0].replica, bench.members[0].port
            async with RawPeer(port, options=options) as peer:
                await peer.hello()
                await peer.call.write(bytes(wire.MAX_MESSAGE_BYTES + 1))
                assert (await peer.status())[0] == "RESOURCE_EXHAUSTED"
                await until(lambda: len(replica._connections) == 1)
            await assert_serves(bench)

    run(main())


def test_random_bytes_on_the_port() -> None:
    """What is no HTTP/2 is closed, and nobody else notices."""
    bench = ClusterBench(1)

    async def main() -> None:
        async with bench.running():
            for body in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 50, b"\xff" * 9):
                reader, writer = await asyncio.open_connection("127.0.0.1", bench.members[0].port)
                writer.write(body)
                await writer.drain()
                async with asyncio.timeout(30):
                    with suppress(ConnectionError):
                        while await reader.read(4096):
                            pass
                writer.close()
                with suppress(ConnectionError):
                    await writer.wait_closed()
            await assert_serves(bench)

    run(main())


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"protocol_version": 99},
            f"protocol_version is 99 at the server and {wire.PROTOCOL_VERSION} at the replica",
        ),
        ({"page_size": 16}, "page_size is 16 at the server and 4 at the replica"),
        ({"tokenizer_digest": "ab"}, "tokenizer_digest is 'ab' at the server and None"),
    ],
)
def test_a_wrong_hello_is_refused_with_its_reason(
    fields: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The peer gets the reason, and the replica logs it in a line."""
    member = Member()

    async def main() -> None:
        await member.start()
        async with RawPeer(member.port) as peer:
            answer = await peer.hello(**fields)
            assert isinstance(answer, wire.Refused)
            assert reason in answer.reason
        assert member.replica.num_refused == 1
        await member.replica.close()

    with caplog.at_level(logging.WARNING):
        run(main())
    assert any(reason in record.getMessage() for record in caplog.records)


def test_a_replica_that_does_not_fit_is_refused_by_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another page size would make every look-up wrong: it never gets a request."""
    bench = ClusterBench(1)

    async def main() -> None:
        other = Member(page_size=8)
        async with bench.running():
            await other.start()
            llm = ClusterLLM(
                {"a": f"127.0.0.1:{bench.members[0].port}", "b": f"127.0.0.1:{other.port}"}, None
            )
            await llm.start(10.0)
            await until(lambda: any(r.last_error for r in llm.dispatch.replicas.values()))
            ready = [replica.name for replica in llm.dispatch.replicas.values() if replica.is_ready]
            assert len(ready) == 1
            await llm.aclose()
            await other.replica.close()

    with caplog.at_level(logging.WARNING):
        run(main())
    assert any("page_size is" in record.getMessage() for record in caplog.records)


def test_a_replica_that_was_refused_may_come_back() -> None:
    """Started anew as it should be, it gets requests; the server need not be started again."""
    bench = ClusterBench(1)

    async def main() -> None:
        other = Member(page_size=8)
        async with bench.running():
            await other.start()
            members = {"a": bench.members[0], "b": other}
            llm = ClusterLLM({n: f"127.0.0.1:{m.port}" for n, m in members.items()}, None)
            await llm.start(10.0)
            replicas = llm.dispatch.replicas
            await until(lambda: any(replica.was_refused.is_set() for replica in replicas.values()))
            [name] = [name for name, replica in replicas.items() if not replica.is_ready]
            await members[name].kill()
            members[name].options = {"page_size": llm.config.page_size}
            await members[name].start_again()
            replicas[name].move(replicas[name].address)
            await until(lambda: all(replica.is_ready for replica in replicas.values()))
            await llm.aclose()
            await other.replica.close()

    run(main())


def test_the_secret_is_needed() -> None:
    """Without it, or with another, nothing is served; with it, everything."""
    credentials = Credentials(secret=SECRET)
    bench = ClusterBench(1)

    async def main() -> None:
        async with bench.running(credentials):
            await assert_serves(bench)
            for shown in (None, Credentials(secret="x" * 20)):
                llm = ClusterLLM(
                    {"a": f"127.0.0.1:{bench.members[0].port}"}, None, credentials=shown
                )
                with pytest.raises(NoReplicaError, match="secret of the cluster"):
                    await llm.start(10.0)
            assert bench.members[0].replica.num_refused == 2

    run(main())


def test_who_lacks_the_secret_is_told_so_however_late_it_writes() -> None:
    """A stream that has ended before the hello shows an error of gRPC's own, and would be tried again."""
    bench = ClusterBench(1)

    async def main() -> None:
        async with bench.running(Credentials(secret=SECRET)):
            replica = bench.members[0].replica
            async with RawPeer(bench.members[0].port) as peer:
                await until(lambda: replica.num_refused == 1)
                await asyncio.sleep(0.05)  # whatever the replica sends has come
                await peer.call.write(wire.encode(wire.Hello(wire.PROTOCOL_VERSION)))
                assert (await peer.status())[0] == "UNAUTHENTICATED"
            async with RawPeer(bench.members[0].port) as silent:
                assert (await silent.status())[0] == "UNAUTHENTICATED"

    run(main())


@pytest.mark.parametrize(
    "step",
    [
        wire.Step(runs=[wire.Run(1 << 40, "stored", b"", b"", b"abc")]),
        wire.Step(load=wire.Load(1, 1, 1, 1, float("nan"), 0.0)),
        wire.Step(load=wire.Load(-1, 1, 1, 1, 0.0, 0.0)),
    ],
    ids=["half a hash", "no number", "negative"],
)
def test_an_impossible_message_of_a_replica_ends_its_connection_only(step: wire.Step) -> None:
    """The server connects again, and goes on to route."""
    bench = ClusterBench(1)

    async def main() -> None:
        async with bench.running():
            await assert_serves(bench)
            replica = bench.members[0].replica
            [before] = replica._connections
            before.send(step)
            await until(lambda: before not in replica._connections and bool(replica._connections))
            await until(lambda: bench.llm.dispatch.members.has_ready)
            await assert_serves(bench)

    run(main())


class Faulty(LeastLoaded):
    """Fails once at a replica's load, by a bug."""

    is_armed = False

    def load(self, replica: str, load: wire.Load) -> None:
        if self.is_armed:
            self.is_armed = False
            raise ZeroDivisionError("planted")


def test_a_connection_that_ends_by_a_bug_says_so() -> None:
    """The calls that it had fail with the bug, not with the end of this server; another one is made."""
    bench = ClusterBench(1)
    routes = bench.routes = Faulty()

    async def main() -> None:
        async with bench.running():
            replica = bench.llm.dispatch.replicas["0"]
            gate = bench.members[0].gate
            gate.is_open = False
            stream = bench.llm.stream(PROMPT, SamplingParams(max_tokens=2, ignore_eos=True))
            await stream.accepted()
            await gate.arrive()
            call = asyncio.ensure_future(replica.call(ReadStats()))
            await until(lambda: bool(replica._calls))
            routes.is_armed = True
            [connection] = bench.members[0].replica._connections
            connection.send(wire.Step(load=wire.Load(1, 1, 1, 1, 0.0, 0.0)))
            for lost in (call, stream.whole()):
                with pytest.raises(
                    ReplicaLostError, match="a bug here: ZeroDivisionError: planted"
                ):
                    await lost
            gate.open()
            await until(lambda: bench.llm.dispatch.members.has_ready)
            await assert_serves(bench)

    run(main())


def test_a_replica_listens_at_an_address_of_ipv6() -> None:
    """With brackets and without; the port is not taken for a part of the address."""

    async def main() -> None:
        for host in ("::1", "[::1]"):
            member = Member()
            member.replica = Replica(member.llm)
            port = await member.replica.start(host)
            llm = ClusterLLM({"a": f"[::1]:{port}"}, None)
            await llm.start(10.0)
            await llm.aclose()
            await member.replica.close()

    run(main())


def test_an_open_port_without_a_secret_is_refused_at_start() -> None:
    """A replica that everybody could use does not start."""

    async def main() -> None:
        member = Member()
        replica = Replica(member.llm)
        with pytest.raises(ConfigError, match="secret"):
            await replica.start("0.0.0.0")
        await replica.close()

    run(main())


def test_a_peer_that_reads_nothing_is_left() -> None:
    """At 8 MiB unsent its requests end with a reason; another server notices nothing."""
    text = "x" * (1 << 20)

    class Decoder:
        def __init__(self, keep: object = False) -> None:
            del keep

        def step(self, token_id: int) -> str:
            del token_id
            return text

        def finish(self) -> str:
            return ""

    bench = ClusterBench(1, text_decoder=Decoder)

    async def main() -> None:
        async with bench.running():
            member = bench.members[0]
            async with RawPeer(member.port) as peer:
                await peer.hello()
                params = {"max_tokens": 1000, "ignore_eos": True}
                await peer.call.write(wire.encode(wire.Add(1, wire.pack_ids([3, 4]), params)))
                await until(lambda: len(member.replica._connections) == 1, 30.0)
                output = await bench.llm.generate(
                    PROMPT, SamplingParams(max_tokens=3, ignore_eos=True)
                )
                assert len(output.token_ids) == 3
                code, details = await peer.status()
                assert code == "RESOURCE_EXHAUSTED"
                assert "reads too slowly" in details
            await member.until_idle()

    run(main())


class Relay:
    """Forwards bytes to a port until it is told to stop, one direction or both."""

    def __init__(self, port: int) -> None:
        self.target, self.is_stopped = port, False
        self.tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self.server.sockets[0].getsockname()[1])

    async def _serve(self, reader: Any, writer: Any) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.target)
        for source, target in ((reader, up_writer), (up_reader, writer)):
            task = asyncio.ensure_future(self._forward(source, target))
            self.tasks.add(task)

    async def _forward(self, source: Any, target: Any) -> None:
        try:
            while body := await source.read(65536):
                while self.is_stopped:  # noqa: ASYNC110 - until the test ends
                    await asyncio.sleep(0.01)
                target.write(body)
        finally:
            target.close()
            with suppress(ConnectionError):
                await target.wait_closed()

    async def close(self) -> None:
        self.server.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def test_a_partition_is_a_death() -> None:
    """A replica that answers nothing any more, though its connection stands, loses its requests."""
    bench = ClusterBench(2)
    params = SamplingParams(max_tokens=20, ignore_eos=True)

    async def main() -> None:
        async with bench.running():
            relay = Relay(bench.members[0].port)
            addresses = {"0": f"127.0.0.1:{await relay.start()}"}
            llm = ClusterLLM(addresses, None, ping_s=0.1, dead_s=1.0)
            await llm.start(10.0)
            bench.members[0].gate.is_open = False
            stream = llm.stream(PROMPT, params)
            await stream.accepted()
            bench.members[0].gate.allowed.release()
            first = await anext(stream)
            relay.is_stopped = True
            llm.dispatch.replicas["0"].address = f"127.0.0.1:{bench.members[1].port}"
            await until(lambda: llm.dispatch.num_live == 0, 10.0)
            events = [event async for event in stream]
            assert events[-1].output is not None
            assert events[-1].output.error is not None
            assert "no sign of life" in str(events[-1].output.error)
            assert events[-1].output.token_ids[:1] == first.new_token_ids[:1]
            await until(lambda: llm.dispatch.members.has_ready)
            output = await llm.generate(PROMPT, params)
            assert list(output.token_ids) == expected(PROMPT, 20, ends=())
            bench.members[0].gate.open()
            await llm.aclose()
            await relay.close()

    run(main())
