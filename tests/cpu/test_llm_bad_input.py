"""Bad input gets one clear error; the rest of the batch is served and no page leaks."""

import re
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ramify import LLM, SamplingParams
from ramify.engine.offline import MAX_KEPT_OUTPUTS
from ramify.errors import (
    CheckpointError,
    ConfigError,
    EmptyPromptError,
    InvalidParamsError,
    PoolTooSmallError,
    PromptTooLongError,
    RequestError,
    RequestTooLargeError,
    TokenOutOfRangeError,
    UnknownOptionError,
    UnknownRequestError,
)
from ramify.outputs import FinishReason
from ramify.testing import write_tiny_checkpoint
from tests.cpu.engine_cases import assert_idle

SHORT = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("llm") / "llama", "llama")


@pytest.fixture(scope="module")
def make(checkpoint: Path) -> Callable[..., LLM]:
    """A factory of engines with options of their own over one checkpoint."""
    return lambda **options: LLM(checkpoint, **{"kv_cache_tokens": 2048, **options})


@pytest.fixture(scope="module")
def engine(make: Callable[..., LLM]) -> LLM:
    return make()


@pytest.fixture
def llm(engine: LLM) -> Iterator[LLM]:
    """The shared engine; asserts after each test that it is idle."""
    yield engine
    assert_idle(engine)


BAD_PROMPTS: list[tuple[Any, type[RequestError], str]] = [
    ("", EmptyPromptError, "0 tokens but at least 1"),
    ([], EmptyPromptError, "0 tokens but at least 1"),
    ([5] * 64, PromptTooLongError, "64 tokens but max_model_len is 64 .* shorten it by 1"),
    ([5] * 62, RequestTooLargeError, "needs 8 pages .* has 7 pages of 8.* kv_cache_tokens >= 64"),
    ([1, 300], TokenOutOfRangeError, r"token id 300 at position 1 is outside 0\.\.299"),
    ([1, -1], TokenOutOfRangeError, "token id -1 at position 1"),
    ([1, 2**80], TokenOutOfRangeError, "position 1"),
    ([1, 2.5], InvalidParamsError, r"prompt\[1\]=2\.5"),
    ([1, True], InvalidParamsError, r"prompt\[1\]=True"),
    ([1, None], InvalidParamsError, r"prompt\[1\]=None"),
    ("a\ud800b", InvalidParamsError, r"prompt\[1\]='\\ud800'"),
]


@pytest.fixture(scope="module")
def narrow(make: Callable[..., LLM]) -> LLM:
    return make(max_model_len=64, kv_cache_tokens=56, page_size=8)


@pytest.mark.parametrize(
    ("prompt", "error", "message"), BAD_PROMPTS, ids=lambda value: str(value)[:20]
)
def test_a_bad_prompt_gets_one_clear_error_and_the_others_go_on(
    narrow: LLM, prompt: Any, error: type[RequestError], message: str
) -> None:
    """A bad prompt fails alone in a batch, raises when given alone, and leaks no page."""
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    good = narrow.generate("the rain", params)[0]

    before, bad, after = narrow.generate(["the rain", prompt, "the rain"], params)

    assert before.token_ids == after.token_ids == good.token_ids
    assert bad.finish_reason is FinishReason.ERROR
    assert (bad.text, bad.token_ids) == ("", ())
    assert type(bad.error) is error
    assert re.search(message, str(bad.error))
    [alone] = narrow.generate([prompt], params)
    assert str(alone.error) == str(bad.error)
    with pytest.raises(error, match=message):
        narrow.add_request(prompt)
    assert_idle(narrow)


def test_what_is_no_prompt_at_all_is_refused(llm: LLM) -> None:
    """A value that is neither text nor token ids is named in the error and not queued."""
    wrong: tuple[Any, ...] = (None, 5, b"bytes", {"role": "user"})
    for prompt in wrong:
        outputs = llm.generate(["a", prompt], SHORT)
        assert outputs[0].error is None
        assert isinstance(outputs[1].error, InvalidParamsError)
    floats = llm.generate([1.5, 2.5], SHORT)  # type: ignore[arg-type]
    assert "prompt=1.5" in str(floats[0].error)
    [booleans] = llm.generate([True, True], SHORT)
    assert "prompt[0]=True" in str(booleans.error)


def test_ids_may_come_in_any_array(llm: LLM) -> None:
    """Token ids may be an array, a numpy array, or a list of numpy integers."""
    wanted = llm.generate([5, 6, 7], SHORT)[0].token_ids

    forms: tuple[Any, ...] = (array("i", [5, 6, 7]), array("q", [5, 6, 7]), np.array([5, 6, 7]))
    several: list[Any] = [*forms, list(forms[2])]
    for prompt in several:
        assert llm.generate([prompt], SHORT)[0].token_ids == wanted


def test_a_call_in_which_every_prompt_is_refused_has_their_errors(llm: LLM) -> None:
    """Alone, in a list with good ones, or in a list of bad ones, a bad prompt is treated alike."""
    prompts: list[Any] = ["", [999]]

    outputs = llm.generate(prompts, SHORT)
    [alone] = llm.generate("", SHORT)

    assert [type(output.error) for output in outputs] == [EmptyPromptError, TokenOutOfRangeError]
    assert isinstance(alone.error, EmptyPromptError)
    assert_idle(llm)


def test_unknown_options_and_values_are_refused(make: Callable[..., LLM]) -> None:
    """An unknown option or value raises an error that names it and the valid choices."""
    with pytest.raises(UnknownOptionError, match=r"unknown option 'page_sise'.*page_size"):
        make(page_sise=3)
    with pytest.raises(ConfigError, match="attention_backend='flash' does not exist; choose auto"):
        make(attention_backend="flash")
    with pytest.raises(ConfigError, match="page_size=0"):
        make(page_size=0)
    with pytest.raises(ConfigError, match=r"max_model_len=5000 .* end at 4096"):
        make(max_model_len=5000)
    with pytest.raises(PoolTooSmallError, match="kv_cache_tokens=15 is 0 pages of 16"):
        make(kv_cache_tokens=15)
    with pytest.raises(TypeError):
        SamplingParams(top_q=1)  # type: ignore[call-arg]


def test_a_directory_without_weights_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    """A directory without weights raises CheckpointError with its path."""
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())

    with pytest.raises(CheckpointError, match=str(tmp_path)):
        LLM(tmp_path)
    with pytest.raises(CheckpointError, match="no directory"):
        LLM(tmp_path / "nothing")


@pytest.mark.parametrize("damage", ["cut", "header", "empty", "missing"])
def test_a_corrupt_shard_is_refused(tmp_path: Path, damage: str) -> None:
    """A corrupt or missing shard raises CheckpointError with the file's name."""
    path = write_tiny_checkpoint(tmp_path, "llama", shards=2)
    shard = path / "model-00002-of-00002.safetensors"
    content = shard.read_bytes()
    if damage == "cut":
        shard.write_bytes(content[: len(content) // 2])
    elif damage == "header":
        shard.write_bytes(b"\xff" * 64 + content[64:])
    elif damage == "empty":
        shard.write_bytes(b"")
    else:
        shard.unlink()

    with pytest.raises(CheckpointError, match=shard.name):
        LLM(path, kv_cache_tokens=64)


def test_without_a_tokenizer_ids_still_work(tmp_path: Path) -> None:
    """Without a tokenizer, token ids are served; text, stop texts and messages are refused."""
    path = write_tiny_checkpoint(tmp_path, "llama", tokenizer=False)
    llm = LLM(path, kv_cache_tokens=256)

    output = llm.generate([5, 6, 7], SHORT)[0]

    assert len(output.token_ids) == 6
    assert output.text == ""
    [text] = llm.generate("text", SHORT)
    [stop] = llm.generate([5], SamplingParams(stop="x"))
    for refused in (text, stop):
        assert isinstance(refused.error, InvalidParamsError)
        assert "no tokenizer" in str(refused.error)
    with pytest.raises(InvalidParamsError, match="no tokenizer"):
        llm.chat([{"role": "user", "content": "x"}])
    assert_idle(llm)


def test_broken_weights_fail_their_requests_and_the_engine_lives(tmp_path: Path) -> None:
    """A NaN embedding fails the request that uses it, and the next request is served."""
    path = write_tiny_checkpoint(tmp_path, "llama")
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][77] = float("nan")
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    llm = LLM(path, kv_cache_tokens=256, page_size=4)

    bad = llm.generate([[5, 77, 6, 7, 8]], SHORT)[0]
    good = llm.generate([[5, 6, 7, 8, 9]], SHORT)[0]

    assert bad.finish_reason is FinishReason.ERROR
    assert "not finite" in str(bad.error)
    assert good.error is None
    assert len(good.token_ids) == 6
    assert_idle(llm)


@pytest.mark.parametrize(
    "prompts",
    [
        np.array([5, 6, 7]),
        torch.tensor([5, 6, 7]),
        [np.int64(5), np.int32(6), 7],
        (5, 6, 7),
        range(5, 8),
        array("i", [5, 6, 7]),
        np.array([[5, 6, 7]]),
        [torch.tensor([5, 6, 7])],
    ],
)
def test_token_ids_come_in_many_forms(llm: LLM, prompts: Any) -> None:
    """Arrays, tensors, tuples and ranges of ids are one prompt, alone or in a list."""
    outputs = llm.generate(prompts, SHORT)

    assert [output.prompt_token_ids for output in outputs] == [(5, 6, 7)]


@pytest.mark.parametrize("prompts", [None, 5, {"a": 1}, {5, 6}, b"ab", (letter for letter in "ab")])
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: Any) -> None:
    """`prompts` refuses dicts, sets, bytes, numbers and generators."""
    with pytest.raises(InvalidParamsError, match=r"prompts=.*a text, token ids, or a list"):
        llm.generate(prompts)


@pytest.mark.parametrize("params", [{"max_tokens": 3}, "x", 5, [1]])
def test_what_are_no_params_is_refused(llm: LLM, params: Any) -> None:
    """`params` refuses everything but SamplingParams."""
    with pytest.raises(InvalidParamsError, match="params="):
        llm.generate(["hi"], params)
    with pytest.raises(InvalidParamsError, match="params="):
        llm.add_request("hi", params)


def test_a_conversation_that_the_template_refuses_does_not_stop_the_others(llm: LLM) -> None:
    """A conversation with an invalid role fails alone; the rest of the batch is served."""
    good = [{"role": "user", "content": "hi"}]
    bad = [{"role": "prophet", "content": "hi"}]

    outputs = llm.chat([good, bad, good], SHORT)

    assert [output.error is None for output in outputs] == [True, False, True]
    assert "prophet" in str(outputs[1].error)
    nothings: tuple[Any, ...] = (None, [], "hi")
    for nothing in nothings:
        with pytest.raises(InvalidParamsError, match="messages="):
            llm.chat(nothing)


def test_a_pool_beyond_the_free_memory_is_refused(make: Callable[..., LLM]) -> None:
    """A pool larger than the free memory raises an error that names the option to lower."""
    with pytest.raises(ConfigError, match=r"needs .* free; lower kv_cache_tokens"):
        make(kv_cache_tokens=10**13)
    with pytest.raises(ConfigError, match=r"needs .* free; lower max_num_seqs"):
        make(max_num_seqs=10**12)


def test_options_take_torch_dtypes_and_numpy_integers(make: Callable[..., LLM]) -> None:
    """Options accept torch dtypes and numpy integers."""
    llm = make(dtype=torch.bfloat16, kv_cache_tokens=np.int64(512))

    assert llm.engine.decoder.dtype == torch.bfloat16
    assert llm.config.kv_cache_tokens == 512


def test_outputs_of_aborted_requests_are_bounded(make: Callable[..., LLM]) -> None:
    """At most MAX_KEPT_OUTPUTS untaken outputs are stored; the oldest are dropped."""
    llm = make()
    first = llm.add_request([5, 6])
    llm.abort(first)
    for _ in range(MAX_KEPT_OUTPUTS):
        llm.abort(llm.add_request([5, 6]))

    with pytest.raises(UnknownRequestError):
        llm.take_output(first)
