"""The process of a replica: when it ends by itself, and what its signals and log lines mean."""

import asyncio
import json
import logging
import os
import signal
from typing import Any

import pytest

from ramify.engine.serving.engine_thread import EngineState, Health
from tests.pure.cluster_bench import run

pytest.importorskip("starlette")
pytest.importorskip("grpc", reason="grpcio is not installed (pip install ramify[cluster])")

from ramify.cluster.run_replica import Signals, until_failure
from ramify.server.operations.request_log import JsonFormatter


class Engine:
    """Says of itself what the test says, one state after the other."""

    def __init__(self, *states: EngineState) -> None:
        self.states = list(states)

    def health(self) -> Health:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return Health(state, False, None, None)


def test_a_replica_ends_with_its_engine() -> None:
    """A ready engine is waited for; one that has stopped ends the wait."""

    async def main() -> None:
        engine: Any = Engine(EngineState.READY, EngineState.READY, EngineState.STOPPED)
        assert await until_failure(engine, check_s=0.0) == "the engine has stopped"
        ready: Any = Engine(EngineState.READY)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(until_failure(ready, check_s=0.001), 0.05)

    run(main())


def test_the_first_signal_is_told_from_the_second() -> None:
    """Both kinds count; afterwards signals are handled as before."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    async def main() -> None:
        signals = Signals()
        signals.install()
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(signals.first.wait(), 10)
            assert not signals.second.is_set()
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.wait_for(signals.second.wait(), 10)
        finally:
            signals.restore()

    run(main())

    assert {number: signal.getsignal(number) for number in before} == before


def test_json_lines_name_the_replica() -> None:
    """A key of every line, beside those of the record."""
    record = logging.LogRecord("name", logging.INFO, "", 0, "text", (), None)
    record.fields = {"id": 7}

    line = json.loads(JsonFormatter({"replica": "3"}).format(record))

    assert (line["replica"], line["id"], line["message"]) == ("3", 7, "text")
