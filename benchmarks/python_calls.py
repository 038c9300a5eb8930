"""Calls of Python functions: a cost of a step that depends on no machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def count_calls(do: Callable[[], object], repetitions: int) -> int:
    """How many Python functions some calls of `do` enter, itself included if it is one."""
    count = 0

    def observe(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(observe)
    try:
        for _ in range(repetitions):
            do()
    finally:
        sys.setprofile(None)
    return count
