"""Suites through the executor of a device: RAMIFY_TEST_RUNNER=device, or device-ahead, on this machine's CPU.

Every engine that a test makes then computes as on a device that has torch's operations: `ops="torch"`
where the test names none (quantised weights stay with the CPU's, which alone compute with them), and
`DeviceExecutor` in place of `LocalExecutor`. With `device-ahead` steps are also begun before the step in
front has ended. `tests/device_suites.toml` lists the suites, and what of them cannot run so, with the
reason.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.full_run import matches

if TYPE_CHECKING:
    from ramify.config import EngineConfig
    from ramify.engine.execution.runner import ModelRunner
    from ramify.engine.step import Executor

RUNNERS = ("device", "device-ahead")
VARIABLE = "RAMIFY_TEST_RUNNER"
TABLE = Path(__file__).with_name("device_suites.toml")


def chosen_runner() -> str:
    """`device`, `device-ahead`, or "" for the executor of the host.

    Raises:
        ValueError: the variable names another.
    """
    name = os.environ.get(VARIABLE, "")
    if name and name not in RUNNERS:
        raise ValueError(f"{VARIABLE}={name!r} but it must be one of {RUNNERS}")
    return name


def read_suites(key: str) -> list[str]:
    """`suites`, which are files, or `quick`, which are ids of tests."""
    suites: list[str] = tomllib.loads(TABLE.read_text("utf-8"))[key]
    return suites


def step_executor(runner: ModelRunner) -> Executor:
    """The executor of a runner whose test builds its engine by hand."""
    from ramify.engine.execution import executors

    return executors.step_executor(runner)


def reason_not_to_run(test_id: str) -> str:
    """Why a test says nothing about the executor of a device, or fails for a reason of its own; "" if it runs."""
    reasons: dict[str, list[str]] = tomllib.loads(TABLE.read_text("utf-8"))["cannot_run"]
    return next((why for why, tests in reasons.items() if matches(test_id, tuple(tests))), "")


def install() -> None:
    """Run the engines of this process by the chosen executor; nothing without one."""
    name = chosen_runner()
    if not name:
        return
    from ramify.engine.execution import assembly, executors
    from ramify.engine.execution.device_executor import DeviceExecutor

    def on_device(runner: ModelRunner, **options: Any) -> DeviceExecutor:
        return DeviceExecutor(runner, **options)

    class LocalEngine(assembly.LocalEngine):
        def __init__(self, requested: EngineConfig, **options: Any) -> None:
            super().__init__(as_on_device(requested, name), **options)

    executors.step_executor = on_device
    assembly.LocalEngine = LocalEngine  # type: ignore[misc]


def as_on_device(requested: EngineConfig, runner: str) -> EngineConfig:
    """The options with torch's operations, and with steps begun ahead if the runner says so."""
    if requested.model.ops == "auto" and not _is_quantised(requested):
        requested = replace(requested, model=replace(requested.model, ops="torch"))
    if requested.scheduler.overlap == "auto" and runner == "device":
        requested = replace(requested, scheduler=replace(requested.scheduler, overlap="off"))
    return requested


def _is_quantised(requested: EngineConfig) -> bool:
    """Whether the weights are integers, or rows are said to be: torch's operations compute with neither."""
    from ramify.models.checkpoint.find import find_checkpoint
    from ramify.models.gguf.container import is_gguf

    options = requested.model
    path = find_checkpoint(options.model, revision=options.revision, offline=options.offline)
    if options.quantize not in ("off", "widen") or options.activations != "int16" or is_gguf(path):
        return True
    config = path / "config.json"
    return config.exists() and "quantization_config" in config.read_text("utf-8")


if __name__ == "__main__":
    for suite in read_suites("suites"):
        print(suite)  # noqa: T201 - `make test-device` reads it
