"""Limits of what is read, before anything works on it."""

import json
import random

import pytest

from ramify.server.errors import ApiError
from ramify.server.http.wire import MAX_DEPTH, decode_body, json_depth


def depth_of(value: object) -> int:
    if not isinstance(value, dict | list):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(depth_of, inner), default=0)


def made(rng: random.Random, level: int) -> object:
    if level == 0 or rng.random() < 0.1:
        return rng.choice(('[{"', "\\", '\\"[', "]}]}", '"', "é[", "\\\\", 1, None))
    inner = [made(rng, level - 1) for _ in range(rng.randrange(1, 4))]
    return inner if rng.random() < 0.5 else {f'{at}"[\\': one for at, one in enumerate(inner)}


@pytest.mark.parametrize("seed", range(40))
def test_depth_counts_brackets_outside_of_strings(seed: int) -> None:
    """Whatever quotes, backslashes and brackets the strings hold."""
    rng = random.Random(seed)
    value = [made(rng, rng.randrange(1, 6)), *[[]] * MAX_DEPTH]

    found = json_depth(json.dumps(value, ensure_ascii=rng.random() < 0.5).encode())

    assert found == depth_of(value)


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 1000, 1_000_000])
def test_a_body_that_is_nested_too_deep_is_refused(depth: int) -> None:
    """Also where nothing reads the value."""
    body = b'{"unknown": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"

    with pytest.raises(ApiError, match="nested more than 64"):
        decode_body(body, dict)


def test_a_body_of_the_greatest_depth_is_read() -> None:
    """The limit is inclusive."""
    body = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH

    assert depth_of(decode_body(body, list)) == MAX_DEPTH
