"""Apply logits transforms on the device of the logits, those of all rows of a step together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.engine.execution.host_copies import to_device
from ramify.engine.logits.logits_processors import LogitsTransform

# (row of the logits, transform, its own row: the number of draft tokens before it)
TransformedRow = tuple[int, LogitsTransform, int]


def apply_transforms(logits: Tensor, rows: Sequence[TransformedRow]) -> None:
    """Change rows of logits [R, vocab_size] float32 in place, as `LogitsTransform.apply` does."""
    _add_biases(logits, rows)
    _subtract_penalties(logits, rows)
    _forbid_by_masks(logits, rows)
    _forbid_stops(logits, rows)


def _add_biases(logits: Tensor, rows: Sequence[TransformedRow]) -> None:
    biased = [(row, transform) for row, transform, _ in rows if len(transform.bias_ids)]
    if biased:
        flat = _flat(logits, [(row, transform.bias_ids) for row, transform in biased])
        bias = np.concatenate([transform.bias for _, transform in biased])
        view = logits.view(-1)
        view[flat] = view[flat] + to_device(bias, logits.device)


def _subtract_penalties(logits: Tensor, rows: Sequence[TransformedRow]) -> None:
    tokens: list[tuple[int, NDArray[np.int32]]] = []
    factors: list[NDArray[np.float32]] = []
    penalties: list[NDArray[np.float32]] = []
    for row, transform, num_drafts in rows:
        if transform.token_counts is None:
            continue
        params, seen = transform.params, transform.token_counts.plus(transform.draft[:num_drafts])
        tokens.append((row, seen.ids))
        factors.append(np.full(len(seen.ids), params.repetition_penalty, np.float32))
        penalty = params.presence_penalty * (seen.counts > 0)
        penalties.append((penalty + params.frequency_penalty * seen.counts).astype(np.float32))
    if tokens:
        flat, view = _flat(logits, tokens), logits.view(-1)
        scores, factor = view[flat], to_device(np.concatenate(factors), logits.device)
        scores = torch.where(scores < 0, scores * factor, scores / factor)
        view[flat] = scores - to_device(np.concatenate(penalties), logits.device)


def _forbid_by_masks(logits: Tensor, rows: Sequence[TransformedRow]) -> None:
    masked: list[int] = []
    masks: list[NDArray[np.uint8]] = []
    for row, transform, num_drafts in rows:
        mask = None if transform.token_bitmasks is None else transform.token_bitmasks[num_drafts]
        if mask is not None:
            masked.append(row)
            masks.append(mask)
    if masks:
        packed = to_device(np.stack(masks), logits.device)
        bits = torch.arange(8, device=logits.device, dtype=torch.uint8)
        allowed = (packed[:, :, None] >> bits & 1).flatten(1)[:, : logits.shape[1]].bool()
        at = to_device(np.array(masked, np.int64), logits.device)
        logits[at] = logits[at].masked_fill(~allowed, -torch.inf)


def _forbid_stops(logits: Tensor, rows: Sequence[TransformedRow]) -> None:
    stopped = [
        (row, transform.stop_token_ids)
        for row, transform, num_drafts in rows
        if num_drafts < transform.num_rows_without_stop and len(transform.stop_token_ids)
    ]
    if stopped:
        flat, view = _flat(logits, stopped), logits.view(-1)
        before = view[flat]
        view[flat] = -torch.inf
        # The grammar allows only its end.
        is_last = logits.amax(1).isneginf()[flat // logits.shape[1]]
        view[flat] = before.where(is_last, before.new_full((), -torch.inf))


def _flat(logits: Tensor, ids: Sequence[tuple[int, NDArray[np.integer]]]) -> Tensor:
    """Indices of (row, token ids) in the flat logits."""
    width = logits.shape[1]
    flat = [row * width + tokens.astype(np.int64) for row, tokens in ids]
    return to_device(np.concatenate(flat), logits.device)
