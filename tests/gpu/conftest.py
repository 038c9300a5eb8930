"""The GPU tier: skipped, with the reason, where it cannot run."""

import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def _reason() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device: this tier needs one"
    if os.environ.get("TRITON_INTERPRET") == "1":  # tests/cpu was collected in this process
        return "Triton is in its interpreter: run tests/gpu by itself"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark this folder's tests only: the hook sees those of all folders."""
    reason = _reason()
    for item in items:
        if reason is not None and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))
