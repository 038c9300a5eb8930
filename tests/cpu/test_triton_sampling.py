"""The sampler of the GPU in the interpreter, against the sampler of the CPU."""
# ruff: noqa: E402 - the kernels import triton, which may be missing

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

triton = pytest.importorskip(
    "triton", reason="the interpreter of Triton's kernels comes with triton"
)

from ramify.engine.execution.sampler import (
    filter_logits,
    philox_uniform,
    sample_from_cdf,
    token_logprob,
)
from ramify.engine.logits.logits_processors import LogitsTransform
from ramify.engine.logits.token_counts import TokenCounts
from ramify.kernels.triton.sample_batch import SampleBatch, SampledRows, SampleRow, likeliest
from ramify.kernels.triton.sampling import NOT_FINITE, NOTHING_LEFT, OK
from ramify.params import SamplingParams

VOCAB, BLOCK = 203, 64
CPU = torch.device("cpu")


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    """Logits with ties: rounded to a quarter."""
    noise = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, VOCAB, generator=noise) * 12).round() / 4


def mask_of(ids: list[int]) -> NDArray[np.uint8]:
    flags = np.zeros(VOCAB, bool)
    flags[ids] = True
    return np.packbits(flags, bitorder="little")


def sample(logits: torch.Tensor, rows: list[SampleRow]) -> SampledRows:
    return SampleBatch.of(rows, VOCAB, CPU).sample(logits, block=BLOCK)


def expected_token(logits: torch.Tensor, row: SampleRow) -> int:
    """By the CPU's own transform, filter and draw."""
    params = SamplingParams(
        temperature=row.temperature,
        top_k=row.top_k,
        top_p=row.top_p,
        min_p=row.min_p,
        repetition_penalty=row.repetition,
        presence_penalty=row.presence,
        frequency_penalty=row.frequency,
    )
    counts = TokenCounts(row.seen_ids, row.seen_counts)
    transform = LogitsTransform(
        params, (), counts, row.bias_ids, row.bias, np.zeros(0, np.int64), 0,
        None if row.mask is None else (row.mask,),
    )  # fmt: skip
    scores = transform.apply(logits.numpy(), 0)
    if row.temperature == 0.0:
        return int(scores.argmax())
    ids, weights = filter_logits(scores, params)
    return sample_from_cdf(ids, weights, philox_uniform(row.seed, row.position), None)


ROWS = {
    "greedy": SampleRow(5),
    "temperature": SampleRow(5, temperature=0.7),
    "hot": SampleRow(5, temperature=1e8),
    "cold": SampleRow(5, temperature=1e-6),
    "top_k": SampleRow(5, temperature=1.3, top_k=7),
    "top_k of all": SampleRow(5, temperature=1.3, top_k=VOCAB),
    "top_p": SampleRow(5, temperature=1.0, top_p=0.6),
    "top_p of ties": SampleRow(5, temperature=1e8, top_p=0.4),
    "min_p": SampleRow(5, temperature=2.0, min_p=0.2),
    "all of them": SampleRow(5, temperature=2.0, top_k=20, top_p=0.8, min_p=0.05),
    "mask": SampleRow(5, temperature=9.0, mask=mask_of([3, 64, 65, 130, 202]), top_k=4),
    "greedy mask": SampleRow(5, mask=mask_of([40, 41])),
    "edits": SampleRow(
        5, temperature=1.0, top_p=0.9, repetition=1.5, presence=0.5, frequency=0.25,
        bias_ids=np.array([1, 200], np.int32), bias=np.array([9.0, 8.5], np.float32),
        seen_ids=np.array([1, 7, 30], np.int32), seen_counts=np.array([0, 2, 1], np.int32),
    ),
    "greedy bias": SampleRow(
        5, bias_ids=np.array([77], np.int32), bias=np.array([100.0], np.float32)
    ),
}  # fmt: skip


def test_tokens_are_those_of_the_sampler_of_the_cpu() -> None:
    """Every option alone and together, over seeds and positions, from the same random numbers."""
    rows = [
        row._replace(seed=seed, position=position)
        for row in ROWS.values()
        for seed, position in ((1, 5), (2**63 - 12345, 40_000))
    ]
    logits = logits_of(len(rows))
    before = logits.clone()

    sampled = sample(logits, rows)

    assert sampled.statuses.tolist() == [OK] * len(rows)
    for index, row in enumerate(rows):
        assert int(sampled.tokens[index]) == expected_token(logits[index], row), row
    assert torch.equal(logits, before)


def test_a_row_depends_on_no_other_row() -> None:
    """The same token, log probability and sum alone and in a batch."""
    rows = list(ROWS.values())[::3]
    logits = logits_of(len(rows), seed=3)
    together = sample(logits, rows)

    for index, row in enumerate(rows):
        alone = sample(logits[index : index + 1].clone(), [row])
        assert [x.tolist() for x in alone] == [x[index : index + 1].tolist() for x in together]


def test_draws_follow_the_probabilities() -> None:
    """Over many positions, each of four tokens comes as often as its probability says."""
    num_draws = 100
    logits = torch.full((1, VOCAB), -torch.inf)
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits[0, [3, 63, 64, 150]] = probabilities.log()
    rows = [SampleRow(at, seed=9, temperature=1.0) for at in range(num_draws)]

    tokens = sample(logits.expand(num_draws, -1).contiguous(), rows).tokens

    counts = torch.bincount(tokens.long(), minlength=VOCAB)[[3, 63, 64, 150]]
    assert int(counts.sum()) == num_draws
    deviation = (num_draws * probabilities * (1 - probabilities)).sqrt()
    assert ((counts - num_draws * probabilities).abs() < 4 * deviation).all()


def test_log_probabilities_are_those_of_the_logits_as_they_came() -> None:
    """Of the drawn token and of the likeliest, in the order of the CPU."""
    rows = [SampleRow(4), ROWS["edits"], ROWS["mask"]]
    logits = logits_of(3, seed=5)
    sampled = sample(logits, rows)

    ids, logprobs = likeliest(
        logits, torch.tensor([2, 0], dtype=torch.int32), sampled.log_sums, 6, block=BLOCK
    )

    for index in range(3):
        expected = token_logprob(logits[index].numpy(), int(sampled.tokens[index]), 6)
        assert abs(float(sampled.logprobs[index]) - expected.logprob) < 1e-5
        for at, row in enumerate((2, 0)):
            if row == index:
                assert ids[at].tolist() == list(expected.top)
                error = logprobs[at] - torch.tensor(list(expected.top.values()))
                assert float(error.abs().max()) < 1e-5


def test_a_temperature_beyond_float32_is_none_of_0_or_infinity() -> None:
    """It draws among the likeliest, or among all, as the CPU does."""
    logits = logits_of(1).expand(8, -1).contiguous()
    logits[:, ::3] = 60.0
    rows = [SampleRow(at, seed=3, temperature=t) for at in range(4) for t in (1e-300, 1e300)]

    tokens = sample(logits, rows).tokens.tolist()

    assert tokens == [expected_token(logits[0], row) for row in rows]


# NumPy warns of inf - inf, and of the logarithm of 0.
@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:divide by zero")
def test_damaged_logits_and_dead_ends_are_reported() -> None:
    """NaN, infinity and no allowed token each give a status, and leave other rows alone."""
    logits = logits_of(5)
    logits[0, 100], logits[1, 7] = torch.nan, torch.inf
    logits[2] = -torch.inf
    rows = [SampleRow(1, temperature=t) for t in (1.0, 0.0, 1.0)]
    rows += [SampleRow(1, temperature=1.0, mask=mask_of([])), SampleRow(1)]

    sampled = sample(logits, rows)

    assert sampled.statuses.tolist() == [NOT_FINITE] * 3 + [NOTHING_LEFT, OK]
    assert int(sampled.tokens[4]) == int(logits[4].argmax())
