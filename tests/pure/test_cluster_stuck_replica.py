"""A step that never ends: its process ends itself, and its answers go on elsewhere."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ramify.cluster.client import ClusterLLM
from ramify.params import SamplingParams
from tests.pure.cluster_bench import Member, prompts, run
from tests.pure.engine_bench import expected

pytest.importorskip("starlette")
pytest.importorskip("grpc", reason="grpcio is not installed (pip install ramify[cluster])")
ROOT = Path(__file__).parents[2]
PROMPT = prompts(1)[0]


@pytest.mark.parametrize("is_draining", [False, True], ids=["serving", "draining"])
def test_a_stuck_step_ends_its_process_and_no_answer(is_draining: bool) -> None:
    """Exit code 1 for whoever starts it again, a line that says why, and the tokens of one engine."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.pure.stuck_replica"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        port = int(json.loads(process.stdout.readline())["port"])

        async def main() -> None:
            other = Member()
            await other.start()
            llm = ClusterLLM({"a": f"127.0.0.1:{port}", "b": f"127.0.0.1:{other.port}"}, None)
            await llm.start(10.0)
            await llm.all_ready(10.0)
            llm.dispatch.replicas["b"].is_draining = True
            stream = llm.stream(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True))
            events = [await anext(stream)]
            if is_draining:
                process.terminate()
            llm.dispatch.replicas["b"].is_draining = False
            events += [event async for event in stream]
            output = events[-1].output
            assert output is not None
            assert output.error is None
            tokens = [token for event in events for token in event.new_token_ids]
            assert tokens == list(output.token_ids) == expected(PROMPT, 20, ends=())
            assert llm.dispatch.num_resumptions == 1
            await llm.aclose()
            await other.replica.close()

        try:
            run(main())
            code = process.wait(10)
            log = process.stderr.read()
        finally:
            process.kill()

    assert code == 1
    assert re.search("CRITICAL.*:a step takes . s already: this process ends", log)
    assert "stuck_replica.py" in log  # the stack of the step


def test_the_end_of_an_engine_does_not_wait_for_a_stuck_step() -> None:
    """A server of one engine that drains: its process ends, with the line that says why."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.pure.stuck_server"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert process.returncode == 1, process.stderr
    assert re.search("CRITICAL.*:a step takes . s already: this process ends", process.stderr)
