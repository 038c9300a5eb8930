"""Engine options, sampling parameters and output formats are validated when constructed."""

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest

from ramify import config as config_module
from ramify.cache import POLICIES
from ramify.config import EngineConfig, ResolvedConfig, resolve
from ramify.errors import (
    ConfigError,
    InvalidParamsError,
    PoolTooSmallError,
    RequestError,
    UnknownOptionError,
)
from ramify.outputs import (
    CacheReport,
    Completion,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    TokenLogprob,
)
from ramify.params import MAX_GRAMMAR_BYTES, SamplingParams, StructuredOutput


def resolved(
    *, model_max_len: int = 1024, token_bytes: int = 100, free_memory: int = 10**9, **options: Any
) -> ResolvedConfig:
    return resolve(
        EngineConfig.of(**options),
        model_max_len=model_max_len,
        token_bytes=token_bytes,
        free_memory=free_memory,
    )


# -- options ---------------------------------------------------------------------------------


def test_an_option_finds_its_section() -> None:
    """`EngineConfig.of` puts each flat option into its section; the others keep their defaults."""
    config = EngineConfig.of(page_size=3, exact=False, max_batch_tokens=1, dtype="bfloat16")

    assert config.cache.page_size == 3
    assert config.attention.exact is False
    assert config.scheduler.max_batch_tokens == 1
    assert config.model.dtype == "bfloat16"
    assert config.scheduler.max_num_seqs == EngineConfig().scheduler.max_num_seqs


@pytest.mark.parametrize("name", ["page_sise", "", "model_section", "cache"])
def test_an_unknown_option_is_an_error_that_lists_the_known_ones(name: str) -> None:
    """An unknown option raises UnknownOptionError, which names it and lists the known options."""
    with pytest.raises(UnknownOptionError) as caught:
        EngineConfig.of(**{name: 1})

    assert repr(name) in str(caught.value)
    assert "page_size" in str(caught.value)
    assert caught.value.name == name


@pytest.mark.parametrize(
    "name",
    [
        "page_size",
        "max_num_seqs",
        "max_batch_tokens",
        "kv_cache_tokens",
        "max_model_len",
    ],
)
@pytest.mark.parametrize("value", [0, -1, 1.5, 16.0, "16", True, float("nan"), [16]])
def test_counts_are_positive_integers(name: str, value: object) -> None:
    """The error names the option, the value and the limit."""
    with pytest.raises(ConfigError) as caught:
        EngineConfig.of(**{name: value})

    assert f"{name}={value!r}" in str(caught.value)
    assert ">= 1" in str(caught.value)


@pytest.mark.parametrize("value", [0, "0", "0GB", -1, 1.5, True, float("nan"), [16], "", "8 pages"])
def test_memory_is_a_size_above_0(value: object) -> None:
    """The error names the option, the value and what is possible."""
    with pytest.raises(ConfigError) as caught:
        EngineConfig.of(kv_cache_memory=value)

    assert f"kv_cache_memory={value!r} but it must be " in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prefix_cache", 1),
        ("exact", "yes"),
        ("exact", None),
        ("dtype", "float16"),
        ("dtype", None),
        ("ops", "gpu"),
        ("ops", None),
        ("policy", "mru"),
        ("policy", ["lru"]),
        ("page_size", None),
        ("coalesce_steps", None),
        ("max_draft_tokens", None),
        ("step_timeout_s", float("inf")),
        ("step_timeout_s", -1),
    ],
)
def test_other_options_have_stated_values(name: str, value: object) -> None:
    """A value that an option does not allow raises ConfigError with the option's name."""
    with pytest.raises(ConfigError, match=f"{name}="):
        EngineConfig.of(**{name: value})


def test_a_registered_policy_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """`policy` accepts every name in POLICIES, including a policy that a user registered."""
    monkeypatch.setitem(POLICIES, "mine", POLICIES["lru"])

    assert EngineConfig.of(policy="mine").cache.policy == "mine"


@pytest.mark.parametrize(
    ("tokens", "page_size", "pages"), [(100, 16, 6), (16, 16, 1), (31, 16, 1), (7, 1, 7), (8, 3, 2)]
)
def test_kv_cache_tokens_round_down_to_pages(tokens: int, page_size: int, pages: int) -> None:
    """The pool holds kv_cache_tokens rounded down to whole pages."""
    config = resolved(kv_cache_tokens=tokens, page_size=page_size)

    assert config.num_pages == pages
    assert config.kv_cache_tokens == pages * page_size <= tokens
    assert config.kv_cache_bytes == pages * page_size * 100


def test_memory_is_bytes_and_tokens_win() -> None:
    """kv_cache_memory is in bytes and is ignored if kv_cache_tokens is given."""
    assert resolved(kv_cache_memory=100 * 16 * 5 + 99).num_pages == 5
    assert resolved(kv_cache_memory=10**6, kv_cache_tokens=32).num_pages == 2
    assert resolved(kv_cache_memory="16KB").num_pages == 10
    assert resolved(kv_cache_memory="16KiB").num_pages == 10
    assert resolved(kv_cache_memory="16000").num_pages == 10


def test_by_default_the_pool_fits_the_machine_and_the_need() -> None:
    """The default pool is MEMORY_SHARE of free memory, at most max_num_seqs full contexts."""
    small, large = resolved(free_memory=10**6), resolved(free_memory=10**12)

    assert small.kv_cache_bytes <= 10**6 * config_module.MEMORY_SHARE
    assert large.kv_cache_tokens == large.max_num_seqs * 1024


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_tokens": 15},
        {"kv_cache_memory": 99},
        {"kv_cache_tokens": 1, "page_size": 2},
        {"free_memory": 0},
    ],
)
def test_a_pool_without_a_page_is_refused(options: dict[str, int]) -> None:
    """A pool smaller than a page raises PoolTooSmallError, which says what to raise."""
    with pytest.raises(PoolTooSmallError, match=r"not a single page; raise kv_cache_tokens"):
        resolved(**options)


def test_the_context_is_the_models_unless_a_shorter_one_is_asked() -> None:
    """`max_model_len` defaults to the model's positions; a larger value raises ConfigError."""
    assert resolved().max_model_len == 1024
    assert resolved(max_model_len=1000).max_model_len == 1000
    assert resolved(max_model_len=1000).max_table_pages == 63
    with pytest.raises(ConfigError, match="max_model_len=1025 but the model's positions end at"):
        resolved(max_model_len=1025)


# -- sampling parameters ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-0.1, float("nan"), float("inf"), "1", None, True]),
        ("top_p", [0.0, 0, -1, 1.01, float("nan"), None, "1"]),
        ("top_k", [0, -1, 1.0, "3", True]),
        ("min_p", [-0.1, 1.1, float("nan"), None, True]),
        ("repetition_penalty", [0, 0.009, -1, 101, float("nan"), float("inf"), None, "1"]),
        ("presence_penalty", [-2.1, 2.1, float("nan"), None]),
        ("frequency_penalty", [-2.1, 2.1, float("inf"), True]),
        ("logit_bias", [None, {-1: 1.0}, {"a": 1.0}, {True: 1.0}, [(1, 1.0)], ((1, 2, 3),), 5]),
        ("allowed_token_ids", [[], (), [-1], [1.0], [True], "ab", 5, iter([1])]),
        ("min_tokens", [-1, 1.5, None, True, 129]),
        ("structured", ["json", {"regex": "a"}, True]),
        ("max_tokens", [0, -1, 1.5, True, "9"]),
        ("seed", [-1, 2**63, 1.0, True]),
        ("stop", [None, "", ["a", ""], [1], 5, iter("ab")]),
        ("stop_token_ids", [None, [-1], [1.0], [True], "ab", 5, iter([1])]),
        ("logprobs", [-1, 1025, 1.0, True]),
        ("prompt_logprobs", [-1, 1025, "all"]),
    ],
)
def test_a_value_outside_its_range_is_refused(name: str, values: list[object]) -> None:
    """InvalidParamsError names parameter and value, and is a RequestError and a ValueError."""
    for value in values:
        with pytest.raises(InvalidParamsError) as caught:
            SamplingParams(**{name: value})  # type: ignore[arg-type]

        assert str(caught.value).startswith(f"{name}=")
        assert isinstance(caught.value, RequestError)
        assert isinstance(caught.value, ValueError)
        assert (caught.value.name, caught.value.value is value) == (name, True)


def test_the_edges_of_the_ranges_are_allowed() -> None:
    """Both ends of every parameter's range are accepted."""
    SamplingParams(temperature=0, top_p=1, top_k=1, seed=0, max_tokens=None, logprobs=0)
    SamplingParams(temperature=1e9, top_p=1e-9, seed=2**63 - 1, max_tokens=1, logprobs=1024)
    SamplingParams(min_p=1, presence_penalty=-2, frequency_penalty=2, repetition_penalty=0.01)
    SamplingParams(logit_bias={0: -100, 5: 100}, allowed_token_ids=[0], min_tokens=128)
    SamplingParams(min_p=0, min_tokens=10**9, max_tokens=None, repetition_penalty=100)


@pytest.mark.parametrize("value", [-100.5, 101, float("nan"), "1", None, True])
def test_a_bias_outside_its_range_is_refused_by_its_token(value: object) -> None:
    """A bias outside [-100, 100], as in the OpenAI API, raises an error that names its token."""
    with pytest.raises(InvalidParamsError, match=r"^logit_bias\[7\]=.* in \[-100, 100\]"):
        SamplingParams(logit_bias={3: 1.0, 7: value})  # type: ignore[dict-item]


def test_parameters_about_tokens_are_values() -> None:
    """Token parameters are sorted copies, so that equal ones compare and hash equal."""
    bias, allowed = {9: 1, 3: -2}, [8, 3, 8]
    params = SamplingParams(logit_bias=bias, allowed_token_ids=allowed)
    bias[5] = 5
    allowed.append(1)

    assert params.biases == {3: -2.0, 9: 1.0}
    assert params.allowed_token_ids == (3, 8)
    assert hash(params) == hash(replace(params))
    assert pickle.loads(pickle.dumps(params)) == params == replace(params)


# -- structured output -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("json_schema", ["{", "[1]", "5", 5, {"a": {1}}, {"enum": ["x" * 70_000]}, " " * 70_000]),
        ("json_schema", [{"a": "\ud800"}]),
        ("json_object", ["yes", 2, None]),
        ("regex", ["", 5, b"a", "x" * 65_537, "ü" * 40_000, "\ud800"]),
        ("grammar", ["", 5, "x" * (MAX_GRAMMAR_BYTES + 1)]),
        ("choice", [[], [""], ["a", 1], "ab", ["x" * 65_537], ["a\udfff"]]),
    ],
)
def test_a_format_that_cannot_be_one_is_refused(name: str, values: list[object]) -> None:
    """An invalid format raises InvalidParamsError of fewer than 500 characters."""
    for value in values:
        with pytest.raises(InvalidParamsError, match=f"^{name}=") as caught:
            StructuredOutput(**{name: value})  # type: ignore[arg-type]
        assert len(str(caught.value)) < 500


def test_exactly_one_format_is_asked() -> None:
    """A StructuredOutput with no format, or with two, raises an error that lists them."""
    with pytest.raises(InvalidParamsError, match=r"structured='nothing' .* exactly one of"):
        StructuredOutput()
    with pytest.raises(InvalidParamsError, match="structured='regex, json_object'"):
        StructuredOutput(regex="a", json_object=True)


def test_a_schema_has_a_greatest_depth() -> None:
    """A schema more than 64 levels deep, or one that contains itself, raises an error."""
    schema: dict[str, object] = {"type": "integer"}
    for _ in range(31):
        schema = {"type": "object", "properties": {"a": schema}}
    assert StructuredOutput(json_schema=schema).json_schema == json.dumps(schema)
    schema = {"properties": {"a": schema}}

    with pytest.raises(InvalidParamsError, match="at most 64 levels deep"):
        StructuredOutput(json_schema=schema)
    with pytest.raises(InvalidParamsError, match="at most 64 levels deep"):
        StructuredOutput(json_schema="[" * 3000 + "]" * 3000)
    endless: dict[str, object] = {}
    endless["items"] = endless
    with pytest.raises(InvalidParamsError, match="at most 64 levels deep"):
        StructuredOutput(json_schema=endless)


def test_formats_are_values() -> None:
    """A schema and its JSON text make equal, hashable, picklable formats."""
    schema = StructuredOutput(json_schema={"type": "object", "title": "ü"})

    assert schema == StructuredOutput(json_schema='{ "type":"object", "title": "\\u00fc"}')
    assert len({schema, replace(schema), pickle.loads(pickle.dumps(schema))}) == 1
    assert StructuredOutput(choice=["a", "b", "a"]).choice == ("a", "b")


def test_stops_become_tuples() -> None:
    """`stop` and `stop_token_ids` become tuples, and later changes to the lists have no effect."""
    texts, ids = ["x", "y"], [3]
    params = SamplingParams(stop=texts, stop_token_ids=ids)
    texts.append("z")
    ids.append(4)

    assert (params.stop, params.stop_token_ids) == (("x", "y"), (3,))
    assert SamplingParams(stop="xy").stop == ("xy",)
    assert hash(params) == hash(SamplingParams(stop=("x", "y"), stop_token_ids=(3,)))
    assert pickle.loads(pickle.dumps(params)) == params


# -- outputs ---------------------------------------------------------------------------------


def test_an_output_is_its_first_completion() -> None:
    """`text`, `token_ids`, `logprobs` and `finish_reason` are those of the first completion."""
    known = (TokenLogprob(5, -0.5, {5: -0.5}),)
    output = RequestOutput(
        request_id=1,
        prompt="p",
        prompt_token_ids=(1, 2, 3),
        completions=(
            Completion("a", (5,), FinishReason.STOP, known),
            Completion("b", (6, 7), FinishReason.LENGTH),
        ),
        metrics=RequestMetrics(0.0, 0.1, 0.2, None),
        cache=CacheReport(1, 1, 1),
    )

    assert (output.text, output.token_ids, output.logprobs) == ("a", (5,), known)
    assert output.finish_reason == "stop"
    assert output.usage.total_tokens == 6
    assert output.usage.cached_tokens == 2
    assert output.cache.prompt_tokens == 3
