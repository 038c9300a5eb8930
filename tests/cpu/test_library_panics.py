"""A panic in compiled code of another project is the error of one request, and of no other."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from starlette.testclient import TestClient

import ramify
from ramify import SamplingParams
from ramify.config import EngineConfig, resolve
from ramify.engine.async_llm import AsyncLLM
from ramify.engine.core import EngineCore
from ramify.engine.logits.grammar_matcher import LlguidanceMatcher
from ramify.engine.text.detokenizer import Detokenizer
from ramify.engine.text.tokenizer import Tokenizer
from ramify.errors import DeadEndError, LibraryPanicError
from ramify.library_panics import panics_as_errors
from ramify.outputs import FinishReason
from ramify.server.app import Server
from ramify.server.service import RequestService
from ramify.testing import FakeExecutor

TINY = Path(ramify.__file__).parent / "data" / "ramify-tiny" / "tokenizer.json"
# Takes more steps at `HARD` than the regular expressions of the package allow.
SLOW_SPLIT = {
    "type": "Split",
    "pattern": {"Regex": r"((a|b)(a|b)?)+\1\2Z"},
    "behavior": "Isolated",
    "invert": False,
}
HARD = "ab" * 500
# Reads beyond the beginning of a token that is shorter.
LONG_STRIP = {"type": "Strip", "content": "a", "start": 0, "stop": 9}


def tokenizer(*, splits: bool = False, strips: bool = False) -> Tokenizer:
    """The built-in model's tokenizer, which panics at `HARD` or at a token that is "a"."""
    fields = json.loads(TINY.read_text("utf-8"))
    if splits:
        inner = [SLOW_SPLIT, fields["pre_tokenizer"]]
        fields["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": inner}
    if strips:
        fields["decoder"] = {"type": "Sequence", "decoders": [fields["decoder"], LONG_STRIP]}
    core = tokenizers.Tokenizer.from_str(json.dumps(fields))
    return Tokenizer(
        core, special_tokens={}, chat_templates={"default": "{{ messages[0].content }}"}
    )


def engine_core(text: Tokenizer, next_token: Any = None) -> EngineCore:
    config = resolve(
        EngineConfig.of(kv_cache_tokens=4096, page_size=4),
        model_max_len=2048,
        token_bytes=1,
        free_memory=0,
    )
    device = FakeExecutor(config.num_pages, 4, vocab_size=text.vocab_size, next_token=next_token)
    factory = partial(Detokenizer, text)
    return EngineCore(config, device, vocab_size=text.vocab_size, detokenizer_factory=factory)


def test_a_panic_becomes_an_error_and_interrupts_pass() -> None:
    """A panic is a LibraryPanicError of one line; Ctrl-C, exits and other errors stay what they are."""
    text = tokenizer(splits=True)

    with pytest.raises(LibraryPanicError, match=r"tokenizers gave up .*retry-limit") as caught:
        text.encode(HARD)

    assert "\n" not in str(caught.value)
    assert text.encode("Who?") == tokenizer().encode("Who?")
    for passing in (KeyboardInterrupt, SystemExit, GeneratorExit, ZeroDivisionError):
        with pytest.raises(passing), panics_as_errors("x"):
            raise passing


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": HARD}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": HARD}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": HARD}]}),
        ("/v1/responses", {"input": HARD, "max_tokens": None, "max_output_tokens": 4}),
        ("/tokenize", {"prompt": HARD}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_panic_is_json_in_every_api(path: str, fields: dict[str, Any], stream: bool) -> None:
    """The tokenizer panics: the client gets a 400 as JSON, streamed or not, and others are served."""
    text = tokenizer(splits=True)
    llm = AsyncLLM.from_core(engine_core(text), text)
    body = {"model": "fake", "max_tokens": 4, "stream": stream} | fields
    body = {name: value for name, value in body.items() if value is not None}
    if path == "/tokenize":
        del body["max_tokens"], body["stream"]
    with TestClient(Server(RequestService(llm, text, model="fake")).app()) as client:
        response = client.post(path, json=body)
        other = client.post("/v1/completions", json={"prompt": "Who?", "max_tokens": 2})

    assert response.status_code == 400
    assert "tokenizers gave up on this request: " in response.json()["error"]["message"]
    assert other.status_code == 200


def test_a_panic_while_decoding_ends_one_request_of_the_batch() -> None:
    """An answer of which no text can be made fails; the other rows of its steps are unchanged."""
    text = tokenizer(strips=True)
    (panicking,) = text.encode("a", add_special_tokens=False)
    (other,) = text.encode("b", add_special_tokens=False)
    core = engine_core(text, lambda ids: panicking if ids[0] == panicking else other)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    bad = core.add_request([panicking, other], params)
    good = core.add_request([other, panicking], params)

    outputs = {}
    while core.has_unfinished:
        for event in core.step():
            if event.output is not None:
                outputs[event.output.request_id] = event.output

    assert outputs[bad].completions[0].finish_reason is FinishReason.ERROR
    assert "index out of bounds" in str(outputs[bad].error)
    assert outputs[good].completions[0].finish_reason is FinishReason.LENGTH
    assert outputs[good].completions[0].text == "bbb"


class PanicException(BaseException):
    """As pyo3 names a panic's exception."""


class Panicking:
    """A matcher of llguidance that panics at its first token."""

    def deep_copy(self) -> "Panicking":
        return self

    def consume_tokens(self, tokens: list[int]) -> bool:
        raise PanicException("index out of bounds")


def test_a_panic_in_a_grammar_ends_its_answer() -> None:
    """A panic while an answer is matched is the dead end of that answer."""
    matcher = LlguidanceMatcher(Panicking(), b"", 8)  # type: ignore[arg-type]

    for call in (matcher.advance, lambda ids: matcher.token_bitmasks(ids, ())):
        with pytest.raises(DeadEndError, match=r"after 1 output .* gave up .index out of bounds"):
            call([1])
