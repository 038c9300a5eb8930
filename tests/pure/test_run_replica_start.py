"""The process of a replica: in which order it starts."""

import os
import signal
import socket
from contextlib import suppress

import pytest

from ramify.cluster.run_replica import ReplicaOptions, _serve
from ramify.engine.cache_admin.warmup import WarmPrompt
from ramify.engine.step import StepPlan, StepResult
from tests.pure.async_bench import Gate
from tests.pure.cluster_bench import Member, prompts, run

pytest.importorskip("grpc", reason="grpcio is not installed (pip install ramify[cluster])")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def is_open(port: int) -> bool:
    with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), 5.0):
        return True
    return False


class Watching(Gate):
    """Notes at each step whether a port is open."""

    def __init__(self, member: Member, port: int) -> None:
        super().__init__(member.bench.device)
        self.port, self.was_open = port, list[bool]()

    def execute(self, plan: StepPlan) -> StepResult:
        self.was_open.append(is_open(self.port))
        return super().execute(plan)


class Ending:
    """Ends this process's replica when it is ready."""

    def __init__(self, gate: Watching) -> None:
        self.gate, self.num_steps, self.is_ready = gate, 0, False

    async def loaded(self) -> None:
        """See `Stages`."""

    def ready(self, port: int, kv_cache_tokens: int) -> None:
        """See `Stages`."""
        assert kv_cache_tokens > 0
        self.num_steps, self.is_ready = len(self.gate.was_open), is_open(port)
        os.kill(os.getpid(), signal.SIGTERM)


def test_no_server_connects_before_the_prompts_are_warm() -> None:
    """The port opens last; at a signal the replica ends with code 0."""
    member, port = Member(), free_port()
    gate = Watching(member, port)
    member.bench.core.executor = gate
    stages = Ending(gate)
    warm = [WarmPrompt(prompt) for prompt in prompts(3, 18)]

    code = run(_serve(ReplicaOptions(port=port), stages, member.llm, None, warm))

    assert code == 0
    assert stages.is_ready
    assert stages.num_steps > 2
    assert not any(gate.was_open[: stages.num_steps])
