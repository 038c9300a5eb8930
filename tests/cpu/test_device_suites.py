"""Parity, exactness and faults through the executor of a device, on the CPU: each in a pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device_runner import RUNNERS, VARIABLE, read_suites, reason_not_to_run

ROOT = Path(__file__).parents[2]
LIMIT_S = 3000

pytestmark = pytest.mark.skipif(VARIABLE in os.environ, reason="runs in such a run already")


def run(runner: str, tests: list[str]) -> None:
    """Run tests by a device's executor, with the examples of `make test`."""
    environment = {name: value for name, value in os.environ.items() if name != "RAMIFY_TESTS"}
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--timeout={LIMIT_S}", *tests],
        cwd=ROOT,
        env=environment | {VARIABLE: runner},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-6000:] + process.stderr[-2000:]


def test_a_share_runs_on_a_device() -> None:
    """Bits from the cache and recovery from damaged K/V, with steps begun ahead."""
    run("device-ahead", read_suites("quick"))


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("suite", read_suites("suites"))
def test_a_suite_runs_on_a_device(suite: str, runner: str) -> None:
    """Tokens, bits, counts and failures are those of the executor of the host."""
    run(runner, [suite])


def test_every_suite_is_there() -> None:
    """A suite that was renamed is renamed here; nothing that runs in every run is among the exceptions."""
    quick = read_suites("quick")

    assert [suite for suite in read_suites("suites") if not (ROOT / suite).is_file()] == []
    assert {test.partition("::")[0] for test in quick} <= set(read_suites("suites"))
    assert [test for test in quick if reason_not_to_run(test)] == []
