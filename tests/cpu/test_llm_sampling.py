"""`LLM` with penalties, biases and formats on a tiny checkpoint, against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ramify import LLM, SamplingParams, StructuredOutput
from ramify.errors import InvalidParamsError
from ramify.testing import write_tiny_checkpoint
from tests.cpu.engine_cases import assert_idle

PROMPT = "the rain in the north is on the other line"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("sampling") / "llama", "llama")


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(checkpoint, page_size=8, kv_cache_tokens=2048, max_batch_tokens=64)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 0.8},
        {"repetition_penalty": 1.3, "sequence_bias": {(80,): 6.0, (90,): -3.0, (100,): 5.5}},
        {"repetition_penalty": 1.2, "min_new_tokens": 20, "eos_token_id": [2, 50, 70, 90, 110]},
    ],
)
@torch.inference_mode()
def test_greedy_answers_are_those_of_transformers(
    options: dict[str, Any], llm: LLM, checkpoint: Path
) -> None:
    """Greedy tokens equal those of transformers, with penalties over prompt and output."""
    ids = list(llm.tokenizer.encode(PROMPT)) if llm.tokenizer else []
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    generate_options = {"max_new_tokens": 40, "eos_token_id": 2, "do_sample": False} | options
    expected = model.generate(torch.tensor([ids]), pad_token_id=0, **generate_options)[
        0, len(ids) :
    ]
    ends = (
        [generate_options["eos_token_id"]]
        if generate_options["eos_token_id"] == 2
        else generate_options["eos_token_id"]
    )

    (output,) = llm.generate(
        [ids],
        SamplingParams(
            max_tokens=40,
            repetition_penalty=options["repetition_penalty"],
            min_tokens=options.get("min_new_tokens", 0),
            stop_token_ids=ends,
            logit_bias={
                token_id: bias for (token_id,), bias in options.get("sequence_bias", {}).items()
            },
        ),
    )

    assert list(output.token_ids) == expected.tolist()
    assert_idle(llm)


def test_options_of_one_request_touch_no_other(llm: LLM) -> None:
    """Plain, penalised and structured requests give the same answers in a batch as alone."""
    many = [
        SamplingParams(max_tokens=30),
        SamplingParams(max_tokens=30, frequency_penalty=1.5, presence_penalty=0.5, logprobs=2),
        SamplingParams(max_tokens=30, temperature=1.0, seed=4, min_p=0.02, logit_bias={80: 5}),
        SamplingParams(
            max_tokens=90, temperature=1.0, seed=4, structured=StructuredOutput(json_schema=PERSON)
        ),
        SamplingParams(max_tokens=30, allowed_token_ids=[70, 71, 72], min_tokens=3),
    ]
    alone = [llm.generate(PROMPT, params)[0] for params in many]
    llm.cache.clear()

    together = llm.generate([PROMPT] * len(many), many)

    assert [output.completions for output in together] == [output.completions for output in alone]
    assert together[0].token_ids != together[1].token_ids
    assert set(together[4].token_ids) <= {70, 71, 72}
    assert_idle(llm)


def test_log_probabilities_are_those_before_any_option(llm: LLM) -> None:
    """A forced token reports the log probability of the unmodified model."""
    free = llm.generate(PROMPT, SamplingParams(max_tokens=1, logprobs=300))[0]
    forced = llm.generate(
        PROMPT, SamplingParams(max_tokens=1, logprobs=0, allowed_token_ids=[99], logit_bias={99: 5})
    )[0]

    assert free.logprobs is not None
    assert forced.logprobs is not None
    assert forced.logprobs[0].token_id == 99
    assert forced.logprobs[0].logprob == free.logprobs[0].top[99]


def test_every_answer_of_a_request_follows_its_format(llm: LLM) -> None:
    """Every branch has a matcher of its own, and every answer that stops is valid JSON."""
    params = SamplingParams(
        n=12,
        temperature=5.0,  # a random model at 1 repeats the whitespace between JSON's tokens
        seed=0,
        max_tokens=120,
        structured=StructuredOutput(json_schema=json.dumps(PERSON)),
    )

    (output,) = llm.generate(PROMPT, params)

    ended = [
        completion.text for completion in output.completions if completion.finish_reason == "stop"
    ]
    values = [json.loads(text) for text in ended]
    assert len(values) >= 6
    assert all(value.keys() == {"name", "old"} for value in values)
    assert all(len(value["name"]) <= 5 and type(value["old"]) is bool for value in values)
    assert len(set(ended)) > 1
    assert_idle(llm)


def test_min_tokens_puts_off_the_end_of_a_format(llm: LLM) -> None:
    """`min_tokens` bans end-of-sequence where the format may end but need not."""
    options: dict[str, Any] = {"temperature": 1.0, "seed": 2, "n": 6, "max_tokens": 80}
    spec, bias = StructuredOutput(regex="(ab)+"), {2: 100}

    free = llm.generate(PROMPT, SamplingParams(structured=spec, logit_bias=bias, **options))[0]
    late = llm.generate(
        PROMPT, SamplingParams(structured=spec, logit_bias=bias, min_tokens=31, **options)
    )[0]

    assert {completion.text for completion in free.completions} == {"ab"}
    assert {completion.text for completion in late.completions} == {"ab" * 16}
    assert {completion.finish_reason for completion in late.completions} == {"stop"}


def test_stop_texts_do_not_end_before_min_tokens(llm: LLM) -> None:
    """A stop text before `min_tokens` stays in the output; a later stop text ends it."""
    plain = llm.generate(PROMPT, SamplingParams(max_tokens=30, ignore_eos=True))[0]
    stop = plain.text[4:6]

    early = llm.generate(PROMPT, SamplingParams(max_tokens=30, ignore_eos=True, stop=stop))[0]
    late = llm.generate(
        PROMPT, SamplingParams(max_tokens=30, ignore_eos=True, stop=stop, min_tokens=30)
    )[0]

    assert early.finish_reason == "stop"
    assert stop not in early.text
    assert len(late.token_ids) == 30
    assert late.text.startswith(plain.text[:6])


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"logit_bias": {300: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [2, 300]}, "allowed_token_ids"),
        ({"structured": StructuredOutput(regex="a(")}, "regex"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(
    options: dict[str, Any], name: str, llm: LLM
) -> None:
    """An option that cannot be served is an InvalidParamsError and queues nothing."""
    params = SamplingParams(n=2, **options)

    [refused] = llm.generate(PROMPT, params)
    with pytest.raises(InvalidParamsError) as caught:
        llm.add_request(PROMPT, params)

    assert str(refused.error) == str(caught.value)
    assert caught.value.name == name
    assert_idle(llm)


def test_a_format_needs_a_tokenizer(tmp_path: Path) -> None:
    """Structured output on a model without a tokenizer is refused."""
    bare = LLM(
        write_tiny_checkpoint(tmp_path, "llama", tokenizer=False, num_hidden_layers=1),
        kv_cache_tokens=256,
    )

    [refused] = bare.generate([1, 2], SamplingParams(structured=StructuredOutput(json_object=True)))

    assert isinstance(refused.error, InvalidParamsError)
    assert "the model has no tokenizer" in str(refused.error)
