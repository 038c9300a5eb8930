"""Outputs that must follow a format, under everything that an engine does to its requests."""

import json
import random
import re
import sys
import threading
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.config import EngineConfig, resolve
from ramify.engine.core import EngineCore
from ramify.engine.logits import grammar as structured
from ramify.engine.logits import grammar_cache
from ramify.engine.logits.grammar import GrammarCompiler
from ramify.engine.logits.grammar_matcher import LlguidanceMatcher
from ramify.engine.request import Request
from ramify.engine.speculation.drafter import accepts_drafts, max_drafts
from ramify.engine.text.detokenizer import Detokenizer
from ramify.engine.text.tokenizer import Tokenizer
from ramify.errors import DeadEndError, InvalidParamsError
from ramify.outputs import FinishReason, RequestOutput
from ramify.params import SamplingParams, StructuredOutput
from ramify.testing import FakeExecutor, write_tiny_checkpoint
from tests.budget import examples

VOCAB, END = 300, 2
PROMPT = [60 + number for number in range(23)]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 3, "maximum": 40},
        "kinds": {"type": "array", "items": {"enum": ["red", "blue", 7]}, "maxItems": 3},
        "open": {"type": "boolean"},
    },
    "required": ["name", "size", "kinds"],
    "additionalProperties": False,
}
LETTERS = 'root ::= item ("," item)*\nitem ::= [a-c]{2,3} | "(" root ")"'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The tiny checkpoints' tokenizer: bytes, and a few merges."""
    return Tokenizer.load(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama"))


@pytest.fixture(scope="module")
def formats(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer.to_json, vocab_size=VOCAB, eos_token_ids=[END])


def matcher_of(formats: GrammarCompiler, spec: StructuredOutput) -> LlguidanceMatcher:
    matcher = formats.compile(spec)
    assert isinstance(matcher, LlguidanceMatcher)
    return matcher


@dataclass
class Teller:
    """Drafts the known answers, often with an error in one token."""

    answers: Iterable[Sequence[int]]
    rng: random.Random = field(default_factory=lambda: random.Random(3))

    def propose(self, running: Sequence[Request]) -> Iterator[tuple[Request, tuple[int, ...]]]:
        for request in running:
            if accepts_drafts(request):
                yield request, self.guess(request, max_drafts(request))

    def verified(self, request: Request, num_accepted: int) -> None:
        assert 0 <= num_accepted <= len(request.draft)

    def guess(self, request: Request, limit: int) -> tuple[int, ...]:
        known = list(request.output_ids)
        rest = [
            list(answer[len(known) :])
            for answer in self.answers
            if list(answer[: len(known)]) == known
        ]
        guesses = self.rng.choice(rest)[: min(limit, self.rng.randrange(9))] if rest else []
        if guesses and self.rng.random() < 0.4:
            guesses[self.rng.randrange(len(guesses))] = self.rng.randrange(VOCAB)
        return tuple(guesses)


def answers(
    tokenizer: Tokenizer,
    formats: GrammarCompiler,
    params: SamplingParams,
    *,
    others: int = 0,
    pool_tokens: int = 4096,
    budget: int = 512,
    fail_at: Container[int] = (),
    error: BaseException | None = None,
    drafter: Teller | None = None,
) -> RequestOutput:
    """Serve PROMPT on an engine whose executor draws at random; checks the cache each step."""
    engine_config = EngineConfig.of(
        kv_cache_tokens=pool_tokens, page_size=4, max_num_seqs=8, max_batch_tokens=budget
    )
    config = resolve(engine_config, model_max_len=1024, token_bytes=1, free_memory=0)
    core = EngineCore(
        config,
        FakeExecutor(config.num_pages, 4, vocab_size=VOCAB, fail_at=fail_at, error=error),
        vocab_size=VOCAB,
        eos_token_ids=[END],
        detokenizer_factory=partial(Detokenizer, tokenizer),
        drafter=drafter,
        grammar_compiler=formats.compile,
    )
    first = core.add_request(PROMPT, params)
    for number in range(others):
        core.add_request(PROMPT[number:], replace(params, seed=number + 900))
    outputs: dict[int, RequestOutput] = {}
    while core.has_unfinished:
        try:
            events = core.step()
        except KeyboardInterrupt:
            continue
        outputs |= {event.request_id: event.output for event in events if event.output is not None}
        core.cache.check()
    assert len(outputs) == others + 1
    assert core.cache.stats().private_pages == 0
    return outputs[first]


def sampled(structured: StructuredOutput, **options: Any) -> SamplingParams:
    defaults: dict[str, Any] = {"temperature": 1.0, "seed": 0, "max_tokens": 150}
    return SamplingParams(structured=structured, **(defaults | options))


def satisfies_schema(text: str) -> bool:
    """Check a JSON text against SCHEMA without a schema library."""
    value = json.loads(text)
    kinds = value["kinds"]
    return (
        value.keys() <= {"name", "size", "kinds", "open"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 6
        and type(value["size"]) is int
        and 3 <= value["size"] <= 40
        and len(kinds) <= 3
        and all(kind in ("red", "blue", 7) for kind in kinds)
        and isinstance(value.get("open", True), bool)
    )


def satisfies_letters(text: str) -> bool:
    while "(" in text:
        inner = re.sub(r"\(((?:[a-c]{2,3},)*[a-c]{2,3})\)", "aa", text)
        if inner == text:
            return False
        text = inner
    return re.fullmatch(r"[a-c]{2,3}(,[a-c]{2,3})*", text) is not None


CASES = {
    "schema": (StructuredOutput(json_schema=SCHEMA), satisfies_schema),
    "regex": (
        StructuredOutput(regex=r"[A-Z][a-z]{1,5}-[0-9]{2}(é|ß)?"),
        lambda text: re.fullmatch(r"[A-Z][a-z]{1,5}-[0-9]{2}(é|ß)?", text) is not None,
    ),
    "choice": (
        StructuredOutput(choice=["yes", "no", 'no\nway \\ "q"', "ünsicher"]),
        lambda text: text in ("yes", "no", 'no\nway \\ "q"', "ünsicher"),
    ),
    "gbnf": (StructuredOutput(grammar=LETTERS), satisfies_letters),
    "lark": (
        StructuredOutput(grammar='start: "<" NAME ">" start? "</>"\nNAME: /[a-z]{1,4}/'),
        lambda text: (
            re.fullmatch(r"(<[a-z]{1,4}>)+(</>)+", text) is not None
            and text.count("</>") == len(re.findall("<[a-z]", text))
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_answer_follows_its_format(
    name: str, tokenizer: Tokenizer, formats: GrammarCompiler
) -> None:
    """Every sampled answer that stops by itself satisfies its format."""
    spec, satisfies = CASES[name]

    output = answers(tokenizer, formats, sampled(spec, n=40))

    ended = [
        completion
        for completion in output.completions
        if completion.finish_reason is FinishReason.STOP
    ]
    assert len(ended) >= 15
    assert {completion.finish_reason for completion in output.completions} <= {"stop", "length"}
    assert [completion.text for completion in ended if not satisfies(completion.text)] == []
    assert len({completion.text for completion in ended}) > 1


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "changes",
    [
        {"pool_tokens": 72, "others": 5},  # preemption
        {"budget": 5},  # the prompt in chunks
        {"fail_at": {0, 3, 7, 11, 16, 30}},
        {"fail_at": {0, 2, 5, 8}, "error": KeyboardInterrupt()},
        {"drafter": True},
        {"drafter": True, "pool_tokens": 72, "others": 5, "budget": 9, "fail_at": {2, 6, 12}},
    ],
    ids=["preempted", "chunked", "failed", "interrupted", "guessed", "all"],
)
def test_the_tokens_are_those_of_a_quiet_engine(
    name: str, changes: dict[str, Any], tokenizer: Tokenizer, formats: GrammarCompiler
) -> None:
    """Preemption, failed steps, interrupts and drafts change no token of a constrained answer."""
    params = sampled(CASES[name][0], n=3, seed=5, max_tokens=40)
    quiet = answers(tokenizer, formats, params)
    expected = [completion.token_ids for completion in quiet.completions]

    if "drafter" in changes:
        changes = changes | {"drafter": Teller(expected)}
    output = answers(tokenizer, formats, params, **changes)

    assert [completion.token_ids for completion in output.completions] == expected
    assert [completion.finish_reason for completion in output.completions] == [
        completion.finish_reason for completion in quiet.completions
    ]
    if "pool_tokens" in changes and name in ("schema", "lark"):  # the long ones
        assert output.metrics.preemptions > 0


@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 10_000), interrupt=st.integers(1, 60))
def test_a_matcher_follows_any_history(seed: int, interrupt: int, formats: GrammarCompiler) -> None:
    """The bitmasks of a matcher match those of a fresh matcher after drafts and rollbacks."""
    rng = random.Random(seed)
    matcher = matcher_of(formats, CASES["schema"][0])
    plain, output = matcher_of(formats, CASES["schema"][0]), list[int]()
    for _ in range(60):
        if plain.advance(output):
            break
        mask = plain.token_bitmasks(output, ())[0]
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        draft = [int(rng.choice(allowed)), *(rng.randrange(VOCAB) for _ in range(3))]

        bitmasks = matcher.token_bitmasks(output, draft)
        if rng.random() < 0.2:
            matcher.advance(output[: rng.randrange(len(output) + 1)])
        if rng.random() < 0.1:
            matcher._num_known = None  # what an interrupt leaves
        assert np.array_equal(bitmasks[0], mask)
        for position in range(1, len(bitmasks)):
            longer = matcher_of(formats, CASES["schema"][0])
            assert np.array_equal(
                bitmasks[position], longer.token_bitmasks([*output, *draft[:position]], ())[0]
            )
        output.append(draft[0])


def test_a_complete_format_ends_the_answer_without_a_token_for_it(
    tokenizer: Tokenizer, formats: GrammarCompiler
) -> None:
    """A complete format ends the answer, even with `ignore_eos` and before `min_tokens`."""
    spec = StructuredOutput(choice=["yes"])

    for options in ({}, {"ignore_eos": True}, {"min_tokens": 50}):
        (completion,) = answers(tokenizer, formats, sampled(spec, **options)).completions
        assert (completion.text, completion.finish_reason, completion.stop_reason) == (
            "yes",
            "stop",
            None,
        )
        assert END not in completion.token_ids


def test_the_end_of_sequence_is_allowed_where_the_format_may_end(
    tokenizer: Tokenizer, formats: GrammarCompiler
) -> None:
    """An end-of-sequence token may end the answer where the format may, even with `ignore_eos`."""
    spec = StructuredOutput(regex="(ab)+")

    for options in ({}, {"ignore_eos": True}):
        output = answers(tokenizer, formats, sampled(spec, n=9, max_tokens=300, **options))

        texts = [
            completion.text
            for completion in output.completions
            if completion.finish_reason == "stop"
        ]
        assert len(texts) > 4
        assert all(re.fullmatch("(ab)+", text) for text in texts)


def test_a_dead_end_is_told(tokenizer: Tokenizer, formats: GrammarCompiler) -> None:
    """A request whose allowed tokens cannot complete the format fails with DeadEndError."""
    spec = StructuredOutput(regex="abcd")
    ids = list(tokenizer.encode("abc", add_special_tokens=False))

    output = answers(tokenizer, formats, sampled(spec, allowed_token_ids=ids))

    assert isinstance(output.error, DeadEndError)
    assert "allowed_token_ids" in str(output.error)
    assert output.finish_reason is FinishReason.ERROR
    assert output.token_ids == tuple(ids)
    with pytest.raises(DeadEndError):
        answers(tokenizer, formats, sampled(spec, allowed_token_ids=[99]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": "a("}, "regex"),
        ({"regex": "(?=a)b"}, "regex"),
        ({"grammar": "start: nowhere"}, "unknown name"),
        ({"grammar": "root ::= ("}, "Expected"),
        ({"grammar": "start: A\nA: /a/ & /b/"}, "no text satisfies it"),
        ({"grammar": "root ::= " + "(" * 9000 + '"a"' + ")" * 9000}, "recursion"),
        ({"json_schema": {"type": "nothing"}}, "Invalid type"),
        ({"json_schema": {"not": {}}}, "Unimplemented"),
        ({"json_schema": {"$ref": "#"}}, "no text satisfies it"),
        ({"json_schema": {"$ref": "https://example.com/schema"}}, "example.com"),
    ],
)
def test_what_cannot_be_compiled_is_refused(
    options: dict[str, Any], message: str, formats: GrammarCompiler
) -> None:
    """A format that cannot be compiled is refused every time, by option name and reason."""
    spec = StructuredOutput(**options)

    for _ in range(2):
        with pytest.raises(InvalidParamsError, match=message) as caught:
            formats.compile(spec)
        assert caught.value.name == next(iter(options))


def test_a_format_that_takes_too_long_blocks_nobody(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    """A slow compilation is refused at the deadline, goes on in one thread, and is then served."""
    properties = {f"p{at}": {"type": "string", "pattern": "^(a|b|c){1,50}x+"} for at in range(900)}
    spec = StructuredOutput(json_schema={"type": "object", "properties": properties})
    formats = GrammarCompiler(tokenizer.to_json, vocab_size=VOCAB, eos_token_ids=[END])
    formats.compile(StructuredOutput(choice=["a"]))
    monkeypatch.setattr(structured, "COMPILE_S", 0.001)

    with pytest.raises(InvalidParamsError, match="simpler: it takes more than"):
        formats.compile(spec)
    (worker,) = [thread for thread in threading.enumerate() if thread.name == "ramify-format"]
    with pytest.raises(InvalidParamsError, match="simpler: it takes more than"):
        formats.compile(spec)
    assert [thread for thread in threading.enumerate() if thread.name == "ramify-format"] == [
        worker
    ]

    worker.join()
    formats.compile(spec).advance(())


def test_formats_that_are_kept_are_bounded(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    """The cache of compiled formats evicts the oldest entries beyond MAX_CACHED."""
    monkeypatch.setattr(grammar_cache, "MAX_CACHED", 3)
    formats = GrammarCompiler(tokenizer.to_json, vocab_size=VOCAB, eos_token_ids=[END])

    for number in range(6):
        formats.compile(StructuredOutput(regex=f"a{number}"))

    assert [spec.regex for spec in formats._cache._tenants[""].by_spec] == ["a3", "a4", "a5"]


def test_without_llguidance_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    """Without llguidance, the error names the extra to install."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    formats = GrammarCompiler(tokenizer.to_json, vocab_size=VOCAB, eos_token_ids=[END])

    with pytest.raises(InvalidParamsError, match=r"pip install 'ramify\[structured\]'"):
        formats.compile(StructuredOutput(regex="a"))


def test_a_tokenizer_without_bytes_is_refused() -> None:
    """Structured output refuses a tokenizer whose tokens have no known bytes."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    formats = GrammarCompiler(words.to_str, vocab_size=2, eos_token_ids=[1])

    with pytest.raises(InvalidParamsError, match="cannot use this model's tokenizer"):
        formats.compile(StructuredOutput(regex="a"))


def test_a_tokenizer_that_llguidance_panics_at_is_refused(tokenizer: Tokenizer) -> None:
    """A vocabulary with an endless token is a fault that is told each time, and tried only once."""
    core = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    core.add_tokens(["x" * 3000])
    num_loads = 0

    def to_json() -> str:
        nonlocal num_loads
        num_loads += 1
        return core.to_str()

    formats = GrammarCompiler(to_json, vocab_size=400, eos_token_ids=[END])

    for _ in range(2):
        with pytest.raises(InvalidParamsError, match="cannot use this model's tokenizer"):
            formats.compile(StructuredOutput(regex="a"))
    assert num_loads == 1


def test_a_vocabulary_may_be_larger_or_smaller_than_the_tokenizers(tokenizer: Tokenizer) -> None:
    """A mask has one bit per model id, and allows no id that has no text."""
    for vocab_size in (270, 300, 301, 4000):
        formats = GrammarCompiler(tokenizer.to_json, vocab_size=vocab_size, eos_token_ids=[END])

        spec = StructuredOutput(regex="(.|\n)*")
        (mask,) = matcher_of(formats, spec).token_bitmasks((), ())

        bits = np.unpackbits(mask, bitorder="little")
        assert len(mask) == -(-vocab_size // 8)
        assert not bits[vocab_size:].any()
        assert not bits[290:].any()
        assert bits[END]


def test_a_choice_may_have_thousands_of_texts(
    tokenizer: Tokenizer, formats: GrammarCompiler
) -> None:
    """A choice of 4,000 texts compiles, and the answer is one of its texts."""
    texts = [f"c{i}" for i in range(4000)]

    (completion,) = answers(tokenizer, formats, sampled(StructuredOutput(choice=texts))).completions

    assert completion.text in texts
    assert completion.finish_reason == "stop"


def test_a_parser_that_gives_up_says_why(tokenizer: Tokenizer, formats: GrammarCompiler) -> None:
    """A grammar with too many rules fails its request with the parser's own message."""
    rules = " | ".join(f'"c{i}"' for i in range(2500))

    answer = answers(tokenizer, formats, sampled(StructuredOutput(grammar=f"start: {rules}")))

    assert answer.finish_reason == "error"
    assert "parser gave up" in str(answer.error)
    assert "items" in str(answer.error)
