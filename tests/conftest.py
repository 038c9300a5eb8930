"""What holds for every tier: no network, no surprises in hypothesis."""

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

from tests.device_runner import chosen_runner, reason_not_to_run
from tests.full_run import TABLE, read_parts

# Before anything imports a library that would look for a hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# One process for each core: threads of theirs would only wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Threads that wait do not spin: on a busy machine that made tiny models 10 times faster.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

# A deadline measures the machine, not the code; CI replays the same examples on every run.
settings.register_profile(
    "ramify",
    deadline=None,
    derandomize="CI" in os.environ,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ramify")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what only a full run has, before the marks choose what runs."""
    _, parts = read_parts(TABLE.read_text(encoding="utf-8"))
    for item in items:
        if any(part.has(item.nodeid) for part in parts.values()):
            item.add_marker("slow")
        if chosen_runner() and (reason := reason_not_to_run(item.nodeid)):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Take what the imports made out of garbage collection: a full collection takes seconds with it."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Give it back, so that libraries which look for leaks at exit find none."""
    gc.unfreeze()
