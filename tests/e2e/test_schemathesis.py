"""schemathesis calls every operation of the OpenAPI document with generated input."""

import os
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.pure.server_bench import ServerBench

TIMEOUT_S = 60  # of a request; the default of 10 s is short for busy cores
EXAMPLES = int(os.environ.get("RAMIFY_SCHEMATHESIS_EXAMPLES", "4"))  # 500 before a release

BENCH = ServerBench(max_model_len=256)  # an answer without max_tokens ends there
BENCH.server.health.is_ready = True
SCHEMA: Any = schemathesis.openapi.from_asgi("/openapi.json", BENCH.app)


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Any:
    yield
    BENCH.llm._engine_thread.stop()
    BENCH.llm._engine_thread.join()
    BENCH.assert_nothing_left()


@SCHEMA.parametrize()
@hypothesis.settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
def test_an_operation_answers_as_documented(case: Any) -> None:
    """For any input: no 5xx, and the documented statuses, content types and schemas."""
    case.call_and_validate(
        timeout=TIMEOUT_S,
        checks=[
            not_a_server_error,
            content_type_conformance,
            response_schema_conformance,
            status_code_conformance,
        ],
    )
