"""Usage of every provider in one meaning; what is absent stays unknown."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.analysis.readers.bodies.usage import parse_usage
from ramify.analysis.records import Usage


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        pytest.param(
            {
                "prompt_tokens": 100,
                "completion_tokens": 5,
                "prompt_tokens_details": {"cached_tokens": 64, "audio_tokens": 0},
            },
            Usage(num_input=100, num_read=64, num_output=5),
            id="openai-chat",
        ),
        pytest.param(
            {
                "input_tokens": 100,
                "input_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 30},
                "output_tokens": 5,
                "output_tokens_details": {"reasoning_tokens": 1},
            },
            Usage(num_input=100, num_read=60, num_written=30, num_output=5),
            id="openai-responses",
        ),
        pytest.param(
            {
                "input_tokens": 3,
                "cache_read_input_tokens": 60,
                "cache_creation_input_tokens": 30,
                "cache_creation": {
                    "ephemeral_5m_input_tokens": 20,
                    "ephemeral_1h_input_tokens": 10,
                },
                "output_tokens": 5,
            },
            Usage(num_input=93, num_read=60, num_written=30, num_written_1h=10, num_output=5),
            id="anthropic",
        ),
        pytest.param(
            {"promptTokenCount": 100, "cachedContentTokenCount": 60, "candidatesTokenCount": 5},
            Usage(num_input=100, num_read=60, num_output=5),
            id="gemini",
        ),
        pytest.param(
            {
                "prompt_tokens": 100,
                "prompt_cache_hit_tokens": 64,
                "prompt_cache_miss_tokens": 36,
                "completion_tokens": 5,
            },
            Usage(num_input=100, num_read=64, num_output=5),
            id="deepseek",
        ),
        pytest.param(
            {
                "inputTokens": 3,
                "cacheReadInputTokens": 60,
                "cacheWriteInputTokens": 30,
                "outputTokens": 5,
            },
            Usage(num_input=93, num_read=60, num_written=30, num_output=5),
            id="bedrock",
        ),
        pytest.param(
            {
                "prompt_tokens": 100,
                "completion_tokens": 5,
                "prompt_tokens_details": {"cached_tokens": 60, "cache_creation_tokens": 30},
                "cache_creation_input_tokens": 30,
                "cache_read_input_tokens": 60,
            },
            Usage(num_input=100, num_read=60, num_written=30, num_output=5),
            id="litellm",
        ),
        pytest.param(
            {
                "gen_ai.usage.input_tokens": 100,
                "gen_ai.usage.cache_read.input_tokens": 60,
                "gen_ai.usage.cache_creation.input_tokens": 30,
                "gen_ai.usage.output_tokens": 5,
            },
            Usage(num_input=100, num_read=60, num_written=30, num_output=5),
            id="otel",
        ),
        pytest.param(
            {"gen_ai.usage.input_tokens": 3, "gen_ai.usage.cache_read.input_tokens": 60},
            Usage(num_input=63, num_read=60),
            id="otel-with-anthropic-counters",
        ),
        pytest.param(
            {
                "input_tokens": 100,
                "cached_input_tokens": 60,
                "cache_write_input_tokens": 30,
                "output_tokens": 5,
            },
            Usage(num_input=100, num_read=60, num_written=30, num_output=5),
            id="codex",
        ),
        pytest.param(
            {
                "input_tokens": 100,
                "input_token_details": {"cache_read": 60, "cache_creation": 30},
                "output_tokens": 5,
            },
            Usage(num_input=100, num_read=60, num_written=30, num_output=5),
            id="langchain",
        ),
    ],
)
def test_counters_have_one_meaning(usage: dict[str, Any], expected: Usage) -> None:
    """The total contains what was read and written, whatever the provider counts."""
    assert parse_usage(usage) == expected


def test_an_absent_counter_is_unknown_and_not_zero() -> None:
    """A server that does not count reads reports none, and no total that contains unknown parts."""
    chat = parse_usage({"prompt_tokens": 7, "completion_tokens": 1})
    null = parse_usage({"prompt_tokens": 7, "prompt_tokens_details": None})
    zero = parse_usage({"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 0}})
    partial = parse_usage({"input_tokens": 7, "cache_read_input_tokens": 5})
    bare = parse_usage({"input_tokens": 7, "output_tokens": 1}, dialect="anthropic")

    assert (chat.num_input, chat.num_read) == (7, None)
    assert null.num_read is None
    assert zero.num_read == 0
    assert (partial.num_input, partial.num_read, partial.num_written) == (None, 5, None)
    assert bare.num_input is None
    assert parse_usage({}) == Usage()


@given(
    usage=st.dictionaries(
        st.sampled_from(
            "prompt_tokens input_tokens cache_read_input_tokens cache_creation cachedContentTokenCount "
            "prompt_tokens_details inputTokens gen_ai.usage.input_tokens completion_tokens".split()
        ),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text()
        | st.lists(st.integers())
        | st.dictionaries(st.text(), st.integers()),
    ),
    dialect=st.sampled_from([None, "anthropic"]),
)
def test_counts_are_counts_or_unknown(usage: dict[str, Any], dialect: str | None) -> None:
    """Whatever stands in a counter, no count is negative or of another type."""
    parsed = parse_usage(usage, dialect=dialect)

    counts = (parsed.num_input, parsed.num_read, parsed.num_written, parsed.num_output)
    assert all(item is None or (type(item) is int and item >= 0) for item in counts)
