"""Sample the tokens of a step by Triton's kernels, in one pass over the logits of each row."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ramify.engine.execution.device_sampler import (
    SampledRows,
    are_greedy,
    greedy_rows,
    log_probabilities,
    rows_of,
)
from ramify.engine.execution.host_copies import to_device
from ramify.engine.logits.banned_sequences import without_tokens
from ramify.engine.logits.logits_processors import LogitsTransform, TokenBitmask
from ramify.engine.step import SampleSpec

if TYPE_CHECKING:  # imports triton
    from ramify.kernels.triton.sample_batch import SampleRow


def has_sampling_kernels(device: torch.device) -> bool:
    """Whether `sample_by_kernels` runs there."""
    return device.type == "cuda" and find_spec("triton") is not None


def sample_by_kernels(logits: Tensor, specs: Sequence[SampleSpec]) -> SampledRows:
    """`device_sampler.sample_rows` without rejection sampling; probabilities are float32.

    Args:
        logits: [R, vocab_size] float32, contiguous; not changed.
    """
    from ramify.kernels.triton.sample_batch import SampleBatch, SampleRow
    from ramify.kernels.triton.sampling import NOT_FINITE, OK

    width, device, rows = logits.shape[1], logits.device, list[SampleRow]()
    if are_greedy(specs):  # two passes over the logits, and nothing to upload
        return greedy_rows(logits)
    placed = rows_of(specs)
    for _, spec, at in placed:
        params, transform = spec.params, spec.logits
        row = SampleRow(
            spec.position + at,
            spec.seed,
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
        )
        if transform is not None and at < transform.num_rows:
            row = _transformed(row, transform, at, width)
        rows.append(row)
    sampled = SampleBatch.of(rows, width, device).sample(logits)
    tokens, statuses, scores = sampled.tokens.long(), sampled.statuses, None
    reporting = [row for row, spec, _ in placed if spec.num_logprobs is not None]
    if reporting:
        # By the operations that score prompts: the same token has the same log probability in both.
        index = to_device(np.array(reporting, np.int64), device)
        num_top = max(spec.num_logprobs or 0 for spec in specs)
        scores = log_probabilities(logits[index], tokens[index], num_top)
    return SampledRows(tokens, statuses != NOT_FINITE, statuses == OK, scores)


def _transformed(row: SampleRow, transform: LogitsTransform, at: int, width: int) -> SampleRow:
    """The row with bias, penalties and mask of a transform's row `at`."""
    mask, bias_ids, bias = _mask(transform, at, width), transform.bias_ids, transform.bias
    if transform.token_counts is None:
        return row._replace(mask=mask, bias_ids=bias_ids, bias=bias)
    params, seen = transform.params, transform.token_counts.plus(transform.draft[:at])
    return row._replace(
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        mask=mask,
        bias_ids=bias_ids,
        bias=bias,
        seen_ids=seen.ids,
        seen_counts=seen.counts,
    )


def _mask(transform: LogitsTransform, at: int, width: int) -> TokenBitmask | None:
    """The allowed tokens: without stop tokens while `min_tokens` forbids them and others are left."""
    mask = None if transform.token_bitmasks is None else transform.token_bitmasks[at]
    if at >= transform.num_rows_without_stop or not len(transform.stop_token_ids):
        return mask
    all_tokens = np.packbits(np.ones(width, np.bool_), bitorder="little")
    others = without_tokens(all_tokens if mask is None else mask, transform.stop_token_ids.tolist())
    return others if others.any() else mask
