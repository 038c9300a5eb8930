"""Triton's kernels run in its interpreter here: whoever imports triton later finds this set."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from tests.device_runner import install

os.environ["TRITON_INTERPRET"] = "1"
install()


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Any]:
    """`TinyModels`, whose references are computed once for all modules."""
    from tests.cpu.tiny_models import TinyModels

    return TinyModels(tmp_path_factory.mktemp("models"))
