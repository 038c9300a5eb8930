"""What clients of a cluster read when no replica can take their request, or go on with its answer."""

import pytest

from ramify.errors import ReplicaLostError
from ramify.server.errors import as_api_error
from tests.pure.cluster_bench import run, until
from tests.pure.server_bench import TOOL_TEMPLATE
from tests.pure.test_cluster_server import ClusterServer
from tests.pure.test_cluster_view import APIS

pytest.importorskip("grpc", reason="grpcio is not installed (pip install ramify[cluster])")


@pytest.mark.parametrize("api", APIS)
def test_errors_name_no_replica(api: str) -> None:
    """Names and addresses of replicas stay with the operator, also where none can take a request."""

    async def main() -> None:
        bench = ClusterServer(chat_template=TOOL_TEMPLATE)
        async with bench.serving() as client:
            for replica in client.dispatch.replicas.values():
                replica.address = "127.0.0.1:1"
                replica.disconnect("the test ends it")
            await until(lambda: not client.dispatch.members.has_ready)
            answer = await bench.post(*APIS[api])
            assert answer.status == 503
            text = answer.body.decode()
            assert "127.0.0.1" not in text
            assert not [name for name in client.dispatch.replicas if name in text]

    run(main())


def test_the_error_of_a_lost_replica_does_not_name_it() -> None:
    """An answer that no other replica can go on with ends with an error about the answer."""
    lost = ReplicaLostError("replica 10.0.0.7:9000 has gone (connection refused)")

    error = as_api_error(lost)

    assert (error.status, error.code) == (503, "replica_lost")
    assert "10.0.0.7" not in error.message
    assert "send the request again" in error.message
