"""`SampleBatch`: the sampling parameters of a step's rows on a device, and the launch of the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.kernels.triton.sampling import sample_rows, top_logprobs

BLOCK = 2048  # ids that a program reads at a time
ENTRIES = 256  # biases or seen tokens likewise
ALIGNMENT, WORD = 16, 4  # bytes
DTYPES = {np.dtype(np.float32): torch.float32, np.dtype(np.int64): torch.int64}
TEMPERATURES = 1e-30, 1e30  # that float32 has; beyond, draws are those at the limit
NO_IDS: NDArray[np.int32] = np.zeros(0, np.int32)
NO_VALUES: NDArray[np.float32] = np.zeros(0, np.float32)


class SampleRow(NamedTuple):
    """How to sample from a row of logits; the meaning of each field is that of `SamplingParams`.

    A tuple: each step makes one for each row.
    """

    position: int  # of the token to draw; with the seed it decides the random number
    seed: int = 0
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    mask: NDArray[np.uint8] | None = None  # a `TokenBitmask`; None allows all
    bias_ids: NDArray[np.int32] = NO_IDS  # distinct
    bias: NDArray[np.float32] = NO_VALUES
    seen_ids: NDArray[np.int32] = NO_IDS  # distinct
    seen_counts: NDArray[np.int32] = NO_IDS  # in the output


class SampledRows(NamedTuple):
    """Results of a step's rows, on the device."""

    tokens: Tensor  # [rows] int32
    statuses: (
        Tensor  # [rows] int32: `OK`, `NOT_FINITE` or `NOTHING_LEFT` of `kernels.triton.sampling`
    )
    logprobs: Tensor  # [rows] float32, of the tokens, from the logits as they came
    log_sums: Tensor  # [rows] float32: log of the sum of the logits' exponentials


@dataclass(frozen=True, slots=True, eq=False)
class SampleBatch:
    """The arguments of `sample_rows` on one device; their shapes are written there, and all are flat."""

    num_rows: int
    vocab_size: int
    floats: Tensor
    ints: Tensor
    seeds: Tensor
    masks: Tensor
    bias_starts: Tensor
    bias_ids: Tensor
    bias: Tensor
    seen_starts: Tensor
    seen_ids: Tensor
    seen_counts: Tensor

    @classmethod
    def of(cls, rows: Sequence[SampleRow], vocab_size: int, device: torch.device) -> SampleBatch:
        """Upload the parameters of some rows, by one copy."""
        # By columns: a call of NumPy for each option, not for each row.
        positions, seeds, temperatures, top_ks, *reals, masks, bias_ids, bias, seen_ids, seen = (
            zip(*rows, strict=True) if rows else [()] * len(SampleRow._fields)
        )
        floats = np.array([temperatures, *reals], np.float64)
        hot = floats[0] > 0.0
        floats[0, hot] = np.clip(floats[0, hot], *TEMPERATURES)
        ints = np.empty((3, len(rows)), np.int64)
        ints[0] = [vocab_size if top_k is None else min(top_k, vocab_size) for top_k in top_ks]
        ints[2] = positions
        packed, ints[1] = _stacked(masks, vocab_size)
        return cls(
            len(rows),
            vocab_size,
            *_upload(
                (
                    floats.T.astype(np.float32, order="C"),
                    ints.T.astype(np.int32, order="C"),
                    np.array(seeds, np.uint64).view(np.int64),
                    packed,
                    *_joined(bias_ids, bias),
                    *_joined(seen_ids, seen),
                ),
                device,
            ),
        )

    def sample(
        self, logits: Tensor, *, edited: Tensor | None = None, block: int = BLOCK
    ) -> SampledRows:
        """Draw a token from each row of logits [rows, vocab_size] float32, contiguous; not changed.

        Args:
            edited: scratch like logits, for rows with biases or penalties; None allocates it.
            block: ids that a program reads at a time, a power of two; part of the arithmetic.
        """
        rows, device = self.num_rows, logits.device
        assert logits.shape == (rows, self.vocab_size) and logits.is_contiguous()
        assert logits.dtype == torch.float32
        tokens, statuses = (torch.empty(rows, dtype=torch.int32, device=device) for _ in range(2))
        logprobs, log_sums = (torch.empty(rows, device=device) for _ in range(2))
        if rows:
            sample_rows[(rows,)](
                logits, torch.empty_like(logits) if edited is None else edited,
                self.masks, self.floats, self.ints, self.seeds,
                self.bias_starts, self.bias_ids, self.bias,
                self.seen_starts, self.seen_ids, self.seen_counts,
                tokens, statuses, logprobs, log_sums,
                VOCAB=self.vocab_size, MASK_WORDS=-(-self.vocab_size // 32), BLOCK=block, ENTRIES=ENTRIES,
                num_warps=8, enable_fp_fusion=False,
            )  # fmt: skip
        return SampledRows(tokens, statuses, logprobs, log_sums)


def _stacked(
    masks: Sequence[NDArray[np.uint8] | None], vocab_size: int
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The masks of all rows as words, not empty, and which of them is each row's; -1 for none."""
    masked = [(at, mask) for at, mask in enumerate(masks) if mask is not None]
    packed = np.zeros((max(1, len(masked)), -(-vocab_size // 32) * 4), np.uint8)
    mask_of_row = np.full(len(masks), -1)
    for number, (at, mask) in enumerate(masked):
        packed[number, : len(mask)] = mask
        mask_of_row[at] = number
    return packed.view(np.int32), mask_of_row


def _joined(
    ids: Sequence[NDArray[np.int32]], values: Sequence[NDArray[np.generic]]
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.generic]]:
    """Where each row's entries begin [rows + 1]; the entries of all rows, not empty: kernels get addresses."""
    starts, dtype = np.zeros(len(ids) + 1, np.int32), values[0].dtype if values else NO_IDS.dtype
    if not any(map(len, ids)):
        return starts, np.zeros(1, np.int32), np.zeros(1, dtype)
    np.cumsum([len(row) for row in ids], out=starts[1:])
    return starts, np.concatenate(ids, dtype=np.int32), np.concatenate(values, dtype=dtype)


def _upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The entries of arrays on a device, by one copy that the host does not wait for.

    Each begins at a multiple of 16 bytes, and is padded to the next: for others, Triton compiles a
    kernel of its own.
    """
    lens = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT // WORD for array in arrays]
    host = torch.empty(sum(lens), dtype=torch.int32, pin_memory=device.type == "cuda")
    words, begin = host.numpy(), 0
    for array, length in zip(arrays, lens, strict=True):
        words[begin : begin + array.nbytes // WORD] = array.reshape(-1).view(np.int32)
        begin += length
    # torch keeps the pinned memory until the copy is done.
    uploaded = host.to(device, non_blocking=True).split(lens)
    return [
        part if array.dtype == np.int32 else part.view(DTYPES[array.dtype])
        for part, array in zip(uploaded, arrays, strict=True)
    ]


def likeliest(
    logits: Tensor, rows: Tensor, log_sums: Tensor, num_top: int, *, block: int = BLOCK
) -> tuple[Tensor, Tensor]:
    """The `num_top` likeliest ids of some rows and their log probabilities, each [R, num_top].

    Args:
        logits: [n, vocab_size] float32, contiguous.
        rows: [R] int32, of logits.
        log_sums: [n] float32, of `SampledRows`.
    """
    shape = len(rows), num_top
    ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    logprobs = torch.empty(shape, device=logits.device)
    if ids.numel():
        top_logprobs[(len(rows),)](
            logits, rows, log_sums, ids, logprobs, num_top,
            VOCAB=logits.shape[1], BLOCK=block, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return ids, logprobs
