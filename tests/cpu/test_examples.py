"""The programs in examples/ run, and the numbers they print are right."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ramify.errors import OutOfPagesError

ROOT = Path(__file__).resolve().parents[2]
IMAGE_POLICY = ROOT / "examples" / "image_policy.py"

# Runs a program and asserts that it did not import `ramify.engine`.
ALONE = """
import runpy, sys
runpy.run_path(sys.argv[1], run_name="__main__")
assert not [name for name in sys.modules if name.startswith("ramify.engine")]
"""


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """The example as a module, not run."""
    spec = importlib.util.spec_from_file_location("image_policy", IMAGE_POLICY)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["image_policy"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_image_policy_runs_without_the_engine_and_saves_what_it_says() -> None:
    """The table shows all tokens computed for a new scene, and no cached frame computed again."""
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])

    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", ALONE, str(IMAGE_POLICY)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert run.returncode == 0, run.stderr
    heading, *rows, last = run.stdout.splitlines()
    assert heading.split() == ["call", "tokens", "computed", "frames", "encoded"]
    assert last == "the same actions as without the cache, in every call"
    table = {row[:32].strip(): [int(cell) for cell in row[32:].split()] for row in rows}
    frame = (32 // 8) ** 2
    tokens, computed, frames = table["a new scene"]
    assert (computed, frames) == (tokens, 2)
    tokens, computed, frames = table["the same scene, told otherwise"]
    assert (computed, frames) == (tokens - 2 * frame, 0)
    tokens, computed, frames = table["two robots, the same scene"]
    # One robot repeats the instruction of the first call.
    assert computed < tokens - 4 * frame
    assert frames == 0
    tokens, computed, frames = table["another second frame"]
    assert (computed, frames) == (tokens - frame, 1)


def test_a_policy_that_does_not_name_its_frames_would_be_caught(example: Any) -> None:
    """Frames share token ids, so an observation without `media` reads another scene's K/V."""

    @dataclass(frozen=True)
    class Blind(example.Observation):  # type: ignore[misc]
        def media(self) -> list[Any]:
            return []

    torch.manual_seed(0)
    policy = example.Policy().eval()
    for kind, agrees in ((example.Observation, True), (Blind, False)):
        cached = example.CachedPolicy(policy)
        cached.act([kind((example.frame(1),), "push")])
        other = kind((example.frame(3),), "push")

        logits = cached.act([other])[1][0]

        assert torch.allclose(logits, policy.act(other)[1], atol=1e-4) == agrees


def test_a_batch_that_does_not_fit_leaves_the_policy_whole(example: Any) -> None:
    """A batch that does not fit raises OutOfPagesError, and a smaller batch then succeeds."""
    torch.manual_seed(0)
    policy = example.Policy().eval()
    cached = example.CachedPolicy(policy)
    robots = [
        example.Observation((example.frame(at), example.frame(at + 100)), "wave" * 30)
        for at in range(8)
    ]

    with pytest.raises(OutOfPagesError):
        cached.act(robots)

    cached.planner.cache.check()
    assert cached.act(robots[:1])[0] == [policy.act(robots[0])[0]]
