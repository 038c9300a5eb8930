"""Logits and K/V after speculative decoding have the bits of a run without speculation.

One step verifies all draft tokens of a request. The logits that tokens are drawn from, and the K/V
left in the cache, are compared as integers with those of the same text computed alone, in one
step and without a cache.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ramify.engine.llm import LLM
from ramify.engine.request import Request
from ramify.engine.speculation.drafter import AdaptiveDrafter, accepts_drafts, max_drafts
from ramify.params import SamplingParams
from ramify.testing import write_tiny_checkpoint
from tests.cpu.bit_scenarios import tokens
from tests.cpu.engine_cases import Engine, Model, Prompt, Sizes, assert_idle, differences

MODELS = [
    ("llama", "float32-torch"),
    ("llama", "bfloat16-torch"),
    ("llama", "float32-padded"),
    ("llama", "float32-blocked"),
    ("llama", "bfloat16"),
    ("qwen3", "bfloat16"),
    ("llama", "float32-int8"),
    ("mistral", "bfloat16-int8"),
    ("v2", "float32"),
    ("v2", "bfloat16"),
]
PROMPTS = [tokens(1, 40), tokens(1, 29) + tokens(2, 5), tokens(3, 265), tokens(4, 1)]
NUM_NEW = 40


class Prophet:
    """Drafter that proposes the known answer up to a random position, then random tokens."""

    def __init__(self, answers: dict[Prompt, Prompt]) -> None:
        self.answers, self.rng = answers, random.Random(5)
        self.num_accepted = self.num_rejected = 0

    def propose(self, running: Sequence[Request]) -> Iterator[tuple[Request, tuple[int, ...]]]:
        for request in running:
            if accepts_drafts(request):
                answer = self.answers[tuple(request.prompt_ids)][len(request.output_ids) :]
                length = min(self.rng.randrange(21), max_drafts(request))
                right = self.rng.randrange(length + 1)
                wrong = [self.rng.randrange(3, 290) for _ in range(length - right)]
                yield request, (*answer[:right], *wrong)

    def verified(self, request: Request, num_accepted: int) -> None:
        self.num_accepted += num_accepted
        self.num_rejected += len(request.draft) - num_accepted


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(("family", "variant"), MODELS)
def test_guesses_leave_no_trace(
    family: str, variant: str, page_size: int, model_of: Callable[[str, str], Model]
) -> None:
    """Batched drafts of up to 20 tokens, partly rejected, change no bit of logits or K/V."""
    model = model_of(family, variant)
    sizes = Sizes(page_size=page_size, num_pages=800 // page_size, max_batch_tokens=64)
    plain = Engine(model, sizes).generate(PROMPTS, [NUM_NEW] * len(PROMPTS))
    prophet = Prophet(
        {prompt: output.token_ids for prompt, (output, _) in zip(PROMPTS, plain, strict=True)}
    )
    engine = Engine(model, sizes, prophet)

    guessed = engine.generate(PROMPTS, [NUM_NEW] * len(PROMPTS))

    assert prophet.num_accepted > 60
    assert prophet.num_rejected > 60
    for prompt, (output, logits), (before, _) in zip(PROMPTS, guessed, plain, strict=True):
        assert output.token_ids == before.token_ids
        kv = engine.cached_kv(prompt + output.token_ids)
        assert len(kv) >= len(prompt) + NUM_NEW - 1 - page_size
        assert list(differences(model, prompt, output.token_ids, logits, kv)) == []


@pytest.mark.parametrize("num_pages", [24, 800])
@pytest.mark.parametrize(
    ("family", "variant"), [("llama", "float32-torch"), ("llama", "bfloat16"), ("v2", "float32")]
)
def test_the_tree_and_the_text_leave_no_trace(
    family: str, variant: str, num_pages: int, model_of: Callable[[str, str], Model]
) -> None:
    """Drafts from the tree and the text change no bit, for repeated or preempted requests."""
    model = model_of(family, variant)
    sizes = Sizes(page_size=4, num_pages=num_pages, max_batch_tokens=40, speculative="auto")
    engine = Engine(model, replace(sizes, max_num_seqs=4))
    prompts = [tokens(1, 20), tokens(1, 17) + tokens(2, 5), tokens(4, 1)]
    answers = engine.generate(prompts, [NUM_NEW] * 3)
    longer = [
        prompt + output.token_ids[:11] for prompt, (output, _) in zip(prompts, answers, strict=True)
    ]

    for batch, num_new in ((prompts, NUM_NEW), (longer, NUM_NEW - 11), (prompts, NUM_NEW + 9)):
        for prompt, (output, logits) in zip(
            batch, engine.generate(batch, [num_new] * 3), strict=True
        ):
            kv = engine.cached_kv(prompt + output.token_ids)
            assert list(differences(model, prompt, output.token_ids, logits, kv)) == []

    assert isinstance(engine.core.drafter, AdaptiveDrafter)
    assert engine.core.drafter.counts["tree"].num_accepted > 20
    assert bool(engine.core.scheduler.num_preemptions) == (num_pages == 24)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("spec") / "llama", "llama")


@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_an_llm_answers_the_same_with_guesses(checkpoint: Path, temperature: float) -> None:
    """Completions with logprobs and n=2 are equal with speculation on and off."""
    params = SamplingParams(
        temperature=temperature, seed=3, n=2, max_tokens=40, logprobs=2, ignore_eos=True
    )
    prompts = [list(tokens(1, 30)), list(tokens(2, 9)) * 4]
    outputs = {}
    for speculative in ("off", "auto"):
        llm = LLM(checkpoint, kv_cache_tokens=4096, speculative=speculative)
        outputs[speculative] = [llm.generate(prompts, params) for _ in range(2)]
        assert_idle(llm)

    for plain, guessed in zip(outputs["off"], outputs["auto"], strict=True):
        assert [output.completions for output in plain] == [
            output.completions for output in guessed
        ]
    accepted = sum(output.metrics.num_accepted for output in outputs["auto"][1])
    assert accepted > 40


def test_rejection_answers_greedily_what_equality_does(checkpoint: Path) -> None:
    """At temperature 0, rejection sampling gives the text that equality sampling gives."""
    prompts, params = [list(tokens(2, 9)) * 4], SamplingParams(max_tokens=40, ignore_eos=True)
    llms = [
        LLM(checkpoint, kv_cache_tokens=4096, exact=False, speculative="auto"),
        LLM(
            checkpoint,
            kv_cache_tokens=4096,
            exact=False,
            speculative="auto",
            speculative_sampling="rejection",
        ),
    ]

    first, second = ([llm.generate(prompts, params)[0].text for _ in range(2)] for llm in llms)

    assert first == second


def test_rejection_is_repeatable_with_the_same_guesses(checkpoint: Path) -> None:
    """Rejection sampling with the same seed and the same drafts draws the same tokens."""
    params = SamplingParams(temperature=0.5, seed=4, max_tokens=40, ignore_eos=True)
    runs = []
    for _ in range(2):
        llm = LLM(
            checkpoint,
            kv_cache_tokens=4096,
            exact=False,
            speculative="auto",
            speculative_sampling="rejection",
        )
        outputs = [llm.generate([list(tokens(2, 9)) * 4], params)[0] for _ in range(2)]
        assert outputs[1].metrics.num_drafted > 0
        runs.append([output.token_ids for output in outputs])

    assert runs[0] == runs[1]
