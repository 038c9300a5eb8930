"""A connection that ends while both sides write."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from ramify.cluster import wire
from ramify.cluster.credentials import Credentials, import_grpc
from ramify.cluster.link import Link
from ramify.engine.identity import EngineIdentity
from tests.pure.cluster_bench import run
from tests.pure.engine_bench import Bench
from tests.pure.test_cluster_deaths import welcome_of

pytest.importorskip("grpc", reason="grpcio is not installed (pip install ramify[cluster])")
NUM_MESSAGES, LIMIT_S = 20, 10.0


class Ending:
    """A replica that answers a hello with many messages, and ends when it has sent them."""

    async def start(self) -> str:
        """Listen; returns the address."""
        grpc = import_grpc()
        service, _, method = wire.METHOD.strip("/").partition("/")
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def _serve(self, requests: AsyncIterator[bytes], context: Any) -> None:
        await anext(requests)
        core = Bench().core
        identity = EngineIdentity.of_namespace(core.namespaces.base, core.config)
        await context.write(wire.encode(welcome_of(core, identity)))
        for number in range(NUM_MESSAGES):
            await context.write(wire.encode(wire.Draining(float(number), False)))
        await context.abort(import_grpc().StatusCode.UNAVAILABLE, "the replica ends")

    async def end(self) -> None:
        """Until it has sent everything, and its port is closed."""
        await self._server.stop(LIMIT_S)


def test_what_a_replica_has_sent_is_received_though_a_write_fails() -> None:
    """With the replica's reason for its end; no task of the connection is left."""
    received: list[Any] = []

    async def main() -> str:
        replica = Ending()
        link = Link(await replica.start(), received.append, Credentials())
        await link.open(wire.Hello(wire.PROTOCOL_VERSION))
        await replica.end()
        link.send(wire.Ping(1))
        return await link.run()

    reason = run(main())

    assert reason == "the replica ends"
    assert [message.retry_after_s for message in received] == [*range(NUM_MESSAGES)]
