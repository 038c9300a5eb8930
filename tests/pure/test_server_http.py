"""Limits of a body's nesting."""

import json
import random

import pytest

from ramify.server.errors import ApiError
from ramify.server.http.json_limits import MAX_DEPTH, json_shape
from ramify.server.http.request_body import decode_body


def depth_of(value: object) -> int:
    if not isinstance(value, dict | list):
        return 0
    elements = value.values() if isinstance(value, dict) else value
    return 1 + max(map(depth_of, elements), default=0)


def random_json(rng: random.Random, level: int) -> object:
    if level == 0 or rng.random() < 0.1:
        return rng.choice(('[{"', "\\", '\\"[', "]}]}", '"', "é[", "\\\\", 1, None))
    elements = [random_json(rng, level - 1) for _ in range(rng.randrange(1, 4))]
    return (
        elements
        if rng.random() < 0.5
        else {f'{index}"[\\': element for index, element in enumerate(elements)}
    )


@pytest.mark.parametrize("seed", range(40))
def test_depth_counts_brackets_outside_of_strings(seed: int) -> None:
    """For random JSON whose strings hold quotes, backslashes and brackets."""
    rng = random.Random(seed)
    value = [random_json(rng, rng.randrange(1, 6)), *[[]] * MAX_DEPTH]

    depth = json_shape(json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()).depth

    assert depth == depth_of(value)


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 1000, 1_000_000])
def test_a_body_that_is_nested_too_deep_is_refused(depth: int) -> None:
    """Also in a field that no type has."""
    body = b'{"unknown": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"

    with pytest.raises(ApiError, match="nested more than 64"):
        decode_body(body, dict)


def test_a_body_of_the_greatest_depth_is_read() -> None:
    """`MAX_DEPTH` is inclusive."""
    body = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH

    assert depth_of(decode_body(body, list)) == MAX_DEPTH
