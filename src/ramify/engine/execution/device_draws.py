"""Draw tokens from logits on their device: temperature, top-k, top-p, min-p, in one pass over all rows.

The rules and the random numbers are those of `sampler`; sums of many weights may round otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ramify.engine.execution.host_copies import to_device

# Philox4x64-10 (Salmon et al. 2011), with the constants of NumPy's generator.
MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
NUM_ROUNDS = 10
_LOW = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, eq=False)
class DrawOptions:
    """How to draw from R rows of logits, as columns on their device; None: no row has that option."""

    temperature: Tensor  # [R, 1] float64, > 0
    numbers: Tensor  # [R] float64 in [0, 1)
    top_k: Tensor | None = None  # [R, 1] int64, the vocabulary's size for rows without
    top_p: Tensor | None = None  # [R, 1] float64, 1 for rows without
    min_p: Tensor | None = None  # [R, 1] float64, 0 for rows without


def draw_tokens(logits: Tensor, options: DrawOptions, drafts: Tensor | None = None) -> Tensor:
    """A token for each row, by inverting the cumulative distribution: [R] int64.

    Args:
        logits: [R, vocab_size] float32; the largest of each row is finite.
        drafts: [R] int64, draft tokens for rejection sampling, -1 for rows without; None: no row is
            sampled by rejection. See `sampler.rejection_sample`.
    """
    weights = _weights(logits, options)
    if drafts is None:
        return _invert(weights, options.numbers)
    draft, is_draft = drafts.clamp(min=0)[:, None], drafts >= 0
    mass = weights.gather(1, draft)[:, 0].where(is_draft, weights.new_zeros(()))
    share = mass / weights.sum(1)
    others = torch.where(is_draft[:, None], weights.scatter(1, draft, 0.0), weights)
    accepts = is_draft & ((options.numbers < share) | ~(others > 0).any(1)) & (mass > 0)
    # What is left of the number decides among the others; where the draft has no weight, all of it.
    numbers = ((options.numbers - share) / (1.0 - share)).where(~accepts, options.numbers)
    return drafts.where(accepts, _invert(others, numbers))


def _weights(logits: Tensor, options: DrawOptions) -> Tensor:
    """Unnormalised probabilities [R, vocab_size] float64 of the candidates, 0 for other tokens."""
    scores = logits.double()
    scores -= scores.amax(1, keepdim=True)
    scores /= options.temperature
    weights = scores.exp_()
    if options.top_k is None and options.top_p is None:
        if options.min_p is not None:
            weights = weights.where(weights >= options.min_p, weights.new_zeros(()))
        return weights
    order = torch.sort(
        logits, dim=1, descending=True, stable=True
    ).indices  # equals by ascending id
    ordered = weights.gather(1, order)
    if options.top_k is not None:
        ranks = torch.arange(logits.shape[1], device=logits.device)
        ordered = ordered.where(ranks < options.top_k, ordered.new_zeros(()))
    if options.top_p is not None:
        mass = ordered.cumsum(1)
        needed = options.top_p * mass[:, -1:]
        before = torch.cat([mass.new_full((len(mass), 1), -1.0), mass[:, :-1]], 1)
        keeps_all = options.top_p >= 1.0
        ordered = ordered.where((before < needed) | keeps_all, ordered.new_zeros(()))
    if options.min_p is not None:
        ordered = ordered.where(ordered >= options.min_p, ordered.new_zeros(()))
    return torch.empty_like(weights).scatter_(1, order, ordered)


def _invert(weights: Tensor, numbers: Tensor) -> Tensor:
    """The first token at which the cumulative weight exceeds its share `numbers` of the whole."""
    mass = weights.cumsum(1)
    total = mass[:, -1:].contiguous()
    tokens = torch.searchsorted(mass, numbers[:, None] * total, right=True)
    # Where the product was rounded up to the whole: the last token with a weight.
    last = torch.searchsorted(mass, total)
    # A row that is not finite gets a token, too: another step may look up its embedding.
    return torch.minimum(tokens, last)[:, 0].clamp_(max=weights.shape[1] - 1)


def philox_uniforms(seeds: Tensor, positions: Tensor, streams: Tensor) -> Tensor:
    """Uniform numbers [R] float64 in [0, 1): those of `sampler.philox_uniform`, on any device.

    Args:
        seeds, positions, streams: [R] int64, not negative.
    """
    keys = torch.stack([seeds, positions])
    # Counter (1, 0, 0, stream): words 0 and 2 are multiplied, 1 and 3 are the others.
    factors = torch.stack([torch.ones_like(seeds), torch.zeros_like(seeds)])
    others = torch.stack([torch.zeros_like(seeds), streams])
    high, low = _halves(MULTIPLIERS, seeds.device)
    multipliers = _column(MULTIPLIERS, seeds.device)
    steps = _column(KEY_STEPS, seeds.device)
    for _ in range(NUM_ROUNDS):
        upper = _multiply_high(factors, high, low)
        lower = factors * multipliers
        factors = upper.flip(0) ^ others ^ keys
        others = lower.flip(0)
        keys = keys + steps
    return ((factors[0] >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def _multiply_high(words: Tensor, high: Tensor, low: Tensor) -> Tensor:
    """Upper 64 bits of the unsigned products of words [2, R] and a constant for each line.

    Args:
        high, low: [2, 1], the halves of the constants.
    """
    upper, lower = (words >> 32) & _LOW, words & _LOW
    middle, other = low * upper, high * lower
    carry = ((low * lower >> 32) & _LOW) + (middle & _LOW) + (other & _LOW)
    return high * upper + ((middle >> 32) & _LOW) + ((other >> 32) & _LOW) + (carry >> 32)


def _halves(words: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    halves = np.array([[word >> 32, word & _LOW] for word in words], np.int64)
    high, low = to_device(halves.T[:, :, None], device)
    return high, low


def _column(words: tuple[int, ...], device: torch.device) -> Tensor:
    """Unsigned 64-bit words as int64 [len(words), 1]."""
    return to_device(np.array(words, np.uint64).view(np.int64)[:, None], device)
