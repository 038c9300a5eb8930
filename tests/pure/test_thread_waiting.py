"""Importing Ramify sets how idle OpenMP threads wait, unless the user has."""

import os
import subprocess
import sys

import pytest

PROGRAM = "import os, ramify; print(os.environ.get('GOMP_SPINCOUNT'))"


@pytest.mark.parametrize(
    ("variables", "spin_count"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")],
)
def test_the_spin_count_is_the_users_or_ours(variables: dict[str, str], spin_count: str) -> None:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment | variables, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert output.stdout.strip() == spin_count
