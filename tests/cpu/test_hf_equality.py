"""Greedy answers equal those of Hugging Face transformers for every page size, chunk size and cache state.

The oracle is `AutoModelForCausalLM` with eager attention in float32, one prompt at a time. For
each of the four families, over 56 prompts of 5 to 200 tokens, most of which share prefixes whose
lengths are multiples of no page size but 1:

- page size 1, 3, 16, 64 × cache off, cold, warm, partly warm, batched, steps of 512 tokens; with
  `ops="torch"` page sizes 3 and 64;
- steps of 7, 64, 512 tokens × batched, alone × cache off, cold, warm, partly warm, with a page
  size that rotates with the family, so that each pair of the two occurs.

An answer may differ by a tie: at the first different token the oracle's two best logits are within
1e-4. At most 0.5 % of all prompts may have a tie.
"""

import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.cache import CacheKey
from ramify.engine.llm import LLM
from ramify.models.loader import read_config
from ramify.outputs import RequestOutput
from ramify.params import SamplingParams
from ramify.testing import TinyFamily, write_tiny_checkpoint
from tests.cpu.engine_cases import LLAMA3_ROPE

transformers = pytest.importorskip("transformers", reason="the oracle needs the extra ramify[hf]")

Prompt = list[int]
Ties = set[tuple[TinyFamily, int]]  # family, prompt number

NUM_NEW = 12
NUM_NEW_SLOWLY = 4  # in the slow runs: small steps, and prompts alone
TIE = 1e-4
MAX_TIES = 0.005  # of all prompts
VOCAB = 300
FIRST_PAGE = 16

# Every family with the settings that only it has, or that differ most from the others'.
FAMILIES: dict[TinyFamily, dict[str, Any]] = {
    # grouped queries, head_dim above hidden_size / num_heads, rope scaling with a visible effect
    "llama": {
        "hidden_size": 72,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "rope_scaling": LLAMA3_ROPE,
    },
    "mistral": {"sliding_window": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 1, "tie_word_embeddings": True},  # multi-query, biases
    "qwen3": {"head_dim": 24, "num_key_value_heads": 4, "rope_theta": 1000000.0},
}
PAGE_SIZES = (1, 3, 16, 64)
STATES = ("off", "cold", "warm", "partly warm")
PACES = ((7, "batched"), (7, "alone"), (64, "batched"), (64, "alone"), (512, "alone"))


def make_prompts() -> list[Prompt]:
    """56 prompts: five prefixes with eight suffixes each, and sixteen that share nothing."""
    draw = random.Random(2)
    prefixes = [draw.choices(range(3, VOCAB), k=length) for length in (22, 37, 53, 85, 118)]
    prompts = [
        prefix + draw.choices(range(3, VOCAB), k=draw.randrange(1, 51))
        for prefix in prefixes
        for _ in range(8)
    ]
    lengths = (5, 6, 9, 13, 17, 22, 31, 33, 47, 64, 65, 90, 111, 150, 192, 200)
    return prompts + [draw.choices(range(3, VOCAB), k=length) for length in lengths]


PROMPTS = make_prompts()


@dataclass(frozen=True)
class Oracle:
    """transformers' greedy answer to every prompt, and the margin of each token."""

    family: TinyFamily
    path: Path
    answers: list[tuple[int, ...]]
    margins: list[list[float]]  # best logit minus second best, per prompt and token


@pytest.fixture(scope="module", params=FAMILIES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """One family's checkpoint with its reference, computed once."""
    family: TinyFamily = request.param
    path = write_tiny_checkpoint(
        tmp_path_factory.mktemp(family), family, tokenizer=False, **FAMILIES[family]
    )
    model = load_oracle(path)
    answers, margins = zip(*(oracle_answer(model, prompt) for prompt in PROMPTS), strict=True)
    return Oracle(family, path, list(answers), list(margins))


@pytest.fixture(scope="module")
def ties() -> Ties:
    """Prompts whose answer differs by a tie of the oracle's two best logits."""
    return set()


def load_oracle(path: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", dtype=torch.float32, local_files_only=True
    )
    return model.eval()


@torch.inference_mode()
def oracle_answer(model: Any, prompt: Prompt) -> tuple[tuple[int, ...], list[float]]:
    answer: list[int] = []
    margins: list[float] = []
    input_ids, past = torch.tensor([prompt]), None
    for _ in range(NUM_NEW):
        output = model(input_ids=input_ids, past_key_values=past, use_cache=True)
        top2 = output.logits[0, -1].topk(2)
        answer.append(int(top2.indices[0]))
        margins.append(float(top2.values[0] - top2.values[1]))
        input_ids, past = top2.indices[None, :1], output.past_key_values
    return tuple(answer), margins


def engine(path: Path, **options: Any) -> LLM:
    return LLM(path, dtype="float32", kv_cache_tokens=16_384, **options)


def generate(
    llm: LLM, prompts: Sequence[Prompt], num_new: int, *, alone: bool = False
) -> list[RequestOutput]:
    params = SamplingParams(max_tokens=num_new, ignore_eos=True)
    batches = [[prompt] for prompt in prompts] if alone else [prompts]
    outputs = [output for batch in batches for output in llm.generate(batch, params)]
    llm.cache.check()
    return outputs


def runs(
    path: Path, num_new: int, *, alone: bool, **options: Any
) -> Iterator[tuple[str, list[RequestOutput]]]:
    """Outputs with the cache off, cold, warm, and warm for prefixes of the prompts only."""
    yield (
        "off",
        generate(engine(path, prefix_cache=False, **options), PROMPTS, num_new, alone=alone),
    )
    llm = engine(path, **options)
    yield "cold", generate(llm, PROMPTS, num_new, alone=alone)
    yield "warm", generate(llm, PROMPTS, num_new, alone=alone)
    llm.cache.clear()
    generate(llm, [prompt[: 2 * len(prompt) // 3] for prompt in PROMPTS], 1)
    yield "partly warm", generate(llm, PROMPTS, num_new, alone=alone)


def differing(oracle: Oracle, outputs: Sequence[RequestOutput]) -> tuple[set[int], set[int]]:
    """Numbers of the prompts whose answer is wrong, and of those whose answer differs by a tie."""
    wrong: set[int] = set()
    tied: set[int] = set()
    for number, (output, answer) in enumerate(zip(outputs, oracle.answers, strict=True)):
        expected = answer[: len(output.token_ids)]
        if output.token_ids != expected:
            pairs = zip(output.token_ids, expected, strict=True)
            first = next(index for index, (ours, right) in enumerate(pairs) if ours != right)
            is_tie = oracle.margins[number][first] < TIE
            (tied if is_tie else wrong).add(number)
    return wrong, tied


def assert_equal(
    oracle: Oracle, runs: Iterator[tuple[str, list[RequestOutput]]], num_new: int, ties: Ties
) -> None:
    """Every run gives the oracle's answers, and its cached tokens fit its cache state."""
    cached_tokens = {}
    for state, outputs in runs:
        assert {len(output.token_ids) for output in outputs} == {num_new}
        wrong, tied = differing(oracle, outputs)
        assert not wrong, f"{state}: prompts {sorted(wrong)} have another answer"
        ties |= {(oracle.family, number) for number in tied}
        assert len(ties) <= MAX_TIES * len(PROMPTS) * len(FAMILIES), f"too many ties: {ties}"
        cached_tokens[state] = sum(output.cache.read_tokens for output in outputs)
    assert tuple(cached_tokens) == STATES
    assert cached_tokens["off"] == 0 < cached_tokens["partly warm"] < cached_tokens["warm"]


@pytest.mark.parametrize(
    ("page_size", "ops"), [*((size, "auto") for size in PAGE_SIZES), (3, "torch"), (64, "torch")]
)
def test_answers_equal_the_oracles_for_every_page_size(
    oracle: Oracle, page_size: int, ops: str, ties: Ties
) -> None:
    """All prompts in one batch: cache off, cold, warm and partly warm."""
    sizes = {"page_size": page_size, "max_batch_tokens": 512}
    outputs = runs(oracle.path, NUM_NEW, alone=False, ops=ops, **sizes)

    assert_equal(oracle, outputs, NUM_NEW, ties)


@pytest.mark.parametrize(("max_batch_tokens", "company"), PACES)
def test_answers_equal_the_oracles_at_every_pace(
    oracle: Oracle, max_batch_tokens: int, company: str, ties: Ties
) -> None:
    """Steps of 7, 64 and 512 tokens, batched and alone, in each cache state."""
    rotation = PACES.index((max_batch_tokens, company)) + list(FAMILIES).index(oracle.family)
    page_size = PAGE_SIZES[rotation % len(PAGE_SIZES)]
    alone = company == "alone"

    outputs = runs(
        oracle.path,
        NUM_NEW_SLOWLY,
        alone=alone,
        page_size=page_size,
        max_batch_tokens=max_batch_tokens,
    )

    assert_equal(oracle, outputs, NUM_NEW_SLOWLY, ties)


# -- would a wrong page be detected? -----------------------------------------------------------


def seeing_first_page(oracle: Oracle) -> list[int]:
    """Numbers of the prompts whose last token attends directly to part of their first page."""
    window = read_config(oracle.path).sliding_window or max(map(len, PROMPTS))
    lengths = enumerate(map(len, PROMPTS))
    return [number for number, length in lengths if FIRST_PAGE < length < FIRST_PAGE + window]


def test_answers_depend_on_the_first_page_of_a_prompt(oracle: Oracle) -> None:
    """Without their first page most prompts get another answer, so a wrong page would show."""
    numbers = seeing_first_page(oracle)
    llm = engine(oracle.path)

    outputs = generate(llm, [PROMPTS[number][FIRST_PAGE:] for number in numbers], NUM_NEW)

    pairs = [
        (output.token_ids, oracle.answers[number])
        for output, number in zip(outputs, numbers, strict=True)
    ]
    changed = sum(answer != whole for answer, whole in pairs)
    assert len(numbers) >= 20
    assert changed >= 0.9 * len(numbers)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_damaged_first_page_is_detected(oracle: Oracle, page_size: int) -> None:
    """Fault injection: warm answers are wrong if the K/V of the first 16 tokens is zeroed."""
    llm = engine(oracle.path, page_size=page_size)
    assert not any(differing(oracle, generate(llm, PROMPTS, NUM_NEW)))

    for prompt in PROMPTS:
        lease = llm.cache.core.acquire(CacheKey(array("i", prompt), llm.core.namespaces.base))
        llm.core.executor.zero_pages(lease.pages[: max(1, FIRST_PAGE // page_size)])
        llm.cache.core.release(lease)
    wrong, _ = differing(oracle, generate(llm, PROMPTS, NUM_NEW))

    affected = {i for i in seeing_first_page(oracle) if len(PROMPTS[i]) > page_size}
    assert len(affected) >= 5
    assert len(wrong & affected) >= 0.8 * len(affected)
