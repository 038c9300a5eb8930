"""The names of ramify.attention resolve on first use, and load no heavy library before."""

import subprocess
import sys

import pytest

import ramify
import ramify.attention

HEAVY = ("torch", "transformers", "numba", "triton", "flashinfer", "safetensors")


def loaded_by(code: str) -> set[str]:
    """The heavy libraries that a fresh interpreter has loaded after running `code`."""
    run = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*({set(HEAVY)!r} & set(sys.modules)))"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import ramify.attention",
        "from ramify.attention import *; RadixAttentionPlanner, RadixSequence, AttentionBatch",
        "from ramify.attention import RadixAttentionPlanner, RadixSequence",
        "from ramify import RadixAttentionPlanner, RadixSequence",
        "import ramify.attention as a; [getattr(a, name) for name in a.__all__]; dir(a)",
    ],
)
def test_pb29_the_planner_loads_no_optional_extra_and_no_torch(code: str) -> None:
    """By name, by star and by attribute."""
    assert loaded_by(code) == set()


def test_pb29_names_are_those_of_their_modules() -> None:
    """Every import path gives the same object; an unknown name is an AttributeError."""
    from ramify.attention import planner, sequence

    assert ramify.attention.RadixSequence is ramify.RadixSequence is sequence.RadixSequence
    assert planner.RadixSequence is sequence.RadixSequence
    assert ramify.attention.RadixAttentionPlanner is planner.RadixAttentionPlanner
    assert "RadixAttentionBlock" not in ramify.attention.__all__
    with pytest.raises(AttributeError, match="no attribute 'Planner'"):
        _ = ramify.attention.Planner
