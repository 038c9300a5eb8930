"""Logits to tokens and log probabilities: temperature, top-k, top-p, min-p, rejection sampling.

Rows are independent: no token depends on the other requests of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ramify.engine.step import SampledTokens, SampleSpec
from ramify.outputs import TokenLogprob
from ramify.params import SamplingParams

Row = NDArray[np.float32]  # [vocab_size]
Rows = NDArray[np.float32]  # [rows, vocab_size]
# Draws a token: (ids, weights, number in [0, 1), draft token for this row or None) → token.
SampleFn = Callable[[NDArray[np.int64] | None, NDArray[np.float64], float, int | None], int]

# Before it sorts all tokens, `_nucleus` tries those whose logit is at most this far below the
# largest, in units of the temperature. Of 152k normal logits of deviation 3, at temperature 0.8, 3k
# are within the first depth and 24k within the second; sorting all of them took 66 ms with ids,
# 1.1 ms without.
NUCLEUS_DEPTHS = (10.0, 14.0)


def sample_from_cdf(
    ids: NDArray[np.int64] | None,
    weights: NDArray[np.float64],
    number: float,
    _draft_token: int | None,
) -> int:
    """Draw a token by inverting the cumulative distribution; ignores the draft token.

    Args:
        ids: [K] candidates; None for the whole vocabulary.
        weights: [K], not negative, not all 0; overwritten.
        number: in [0, 1), decides.
    """
    mass = np.cumsum(weights, out=weights)
    index = int(np.searchsorted(mass, number * mass[-1], side="right"))
    if index == len(mass):  # number * mass[-1] was rounded up to mass[-1]
        index = int(np.searchsorted(mass, mass[-1], side="left"))
    return index if ids is None else int(ids[index])


def rejection_sample(
    ids: NDArray[np.int64] | None,
    weights: NDArray[np.float64],
    number: float,
    draft_token: int | None,
) -> int:
    """Accept the draft token with its probability p, else draw one of the other tokens.

    Speculative sampling (Leviathan et al. 2023; Chen et al. 2023) for a draft token that was not
    drawn from a distribution, so its draft probability is 1: it is accepted with the probability p
    that the target gives it; otherwise the token is drawn from the target without it, renormalised.
    One number in [0, 1) decides both: below p it accepts, and (number - p) / (1 - p) is uniform.

    The tokens have the target's distribution, but depend on the drafts: the same seed gives other
    tokens with other drafts. `sample_from_cdf` draws the draft token with the same probability p,
    so it accepts as often, and depends on seed and position alone.

    Args: as for `sample_from_cdf`.
    """
    ids = np.arange(len(weights)) if ids is None else ids
    is_draft = ids == (-1 if draft_token is None else draft_token)
    if not is_draft.any():
        return sample_from_cdf(ids, weights, number, None)
    share = float(weights[is_draft][0] / weights.sum())
    others = weights[~is_draft]
    if number < share or not others.any():
        return int(ids[is_draft][0])
    return sample_from_cdf(ids[~is_draft], others, (number - share) / (1.0 - share), None)


def sample_batch(
    logits: Rows, specs: Sequence[SampleSpec], sample_fn: SampleFn = sample_from_cdf
) -> tuple[dict[int, SampledTokens], dict[int, str]]:
    """Sampled tokens by request id, and why others have none, by request id.

    Args:
        logits: [sum of 1 + len(spec.draft), vocab_size], in the order of `specs`.
        sample_fn: draws a token at a temperature > 0.
    """
    sampled: dict[int, SampledTokens] = {}
    failed: dict[int, str] = {}
    likeliest = logits.argmax(axis=1)  # the lowest id of equals; a NaN wins over all numbers
    are_finite = np.isfinite(logits[np.arange(len(logits)), likeliest]).tolist()
    tokens = likeliest.tolist()
    start = 0
    for spec in specs:
        if are_finite[start] and _is_plain_greedy(spec):
            sampled[spec.request_id] = SampledTokens((tokens[start],))
            start += 1
            continue
        end = start + len(spec.draft) + 1
        try:
            sampled[spec.request_id] = _sample_rows(
                logits[start:end], spec, tokens[start:end], are_finite[start:end], sample_fn
            )
        except FloatingPointError as error:
            failed[spec.request_id] = str(error)
        start = end
    return sampled, failed


def _is_plain_greedy(spec: SampleSpec) -> bool:
    """Whether the request needs nothing but the likeliest token of one row."""
    is_bare = spec.logits is None and spec.num_logprobs is None
    return is_bare and not spec.draft and spec.params.temperature == 0.0


def _sample_rows(
    logits: Rows,
    spec: SampleSpec,
    likeliest: list[int],
    are_finite: list[bool],
    sample_fn: SampleFn,
) -> SampledTokens:
    """Tokens of one request, row by row until one differs from its draft token."""
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    transform = spec.logits
    is_plain = transform is None and spec.params.temperature == 0.0
    num_rows = len(logits) if transform is None else transform.num_rows
    for row in range(num_rows):
        if not are_finite[row]:
            raise FloatingPointError(
                f"the logits of request {spec.request_id} at position {spec.position + row} "
                "are not finite; the weights or the K/V are damaged"
            )
        token = likeliest[row] if is_plain else sample_token(logits[row], spec, row, sample_fn)
        tokens.append(token)
        if spec.num_logprobs is not None:
            logprobs.append(token_logprob(logits[row], token, spec.num_logprobs))
        if row < len(spec.draft) and token != spec.draft[row]:
            break
    return SampledTokens(tuple(tokens), tuple(logprobs))


def sample_token(
    logits: Row, spec: SampleSpec, row: int = 0, sample_fn: SampleFn = sample_from_cdf
) -> int:
    """Draw the token after the first `row` draft tokens, from their logits [vocab_size].

    Temperature 0 takes the likeliest token, of equals the one with the lowest id. Otherwise a
    candidate of `filter_logits` is drawn by a number that depends on (seed, position) alone; in
    rejection sampling of a draft token, on the request id too.

    Raises:
        FloatingPointError: all allowed tokens have a logit of minus infinity.
    """
    if spec.logits is not None:
        logits = spec.logits.apply(logits, row)
        if not np.isfinite(logits.max()):
            raise FloatingPointError(
                f"no token is left for request {spec.request_id} at position "
                f"{spec.position + row}: the scores of all that are allowed are not finite"
            )
    if spec.params.temperature == 0.0:
        return int(logits.argmax())
    ids, weights = filter_logits(logits, spec.params)
    draft_token = spec.draft[row] if row < len(spec.draft) else None
    # A number that accepts or rejects a draft token must be independent of the draft, which another
    # request with the same seed may have drawn: it gets a random stream of its own.
    stream = 0 if draft_token is None or sample_fn is sample_from_cdf else 1 + spec.request_id
    number = philox_uniform(spec.seed, spec.position + row, stream)
    return sample_fn(ids, weights, number, draft_token)


def filter_logits(
    logits: Row, params: SamplingParams
) -> tuple[NDArray[np.int64] | None, NDArray[np.float64]]:
    """Candidates at a temperature > 0, by ascending id, and their weights.

    Keeps the `top_k` likeliest tokens; of these the smallest set of likeliest tokens with a mass of
    at least `top_p`; of these the tokens at least `min_p` times as likely as the likeliest. Ties at
    the border of the first two go to the lower ids.

    Args:
        logits: [vocab_size], at least one finite, none NaN or plus infinity.

    Returns:
        ids [K], or None for the whole vocabulary, and weights [K], a new array: unnormalised
        probabilities, 1 for the likeliest token.
    """
    ids: NDArray[np.int64] | None = None
    if params.top_k is not None and params.top_k < len(logits):
        ids = _largest(logits, params.top_k)
        logits = logits[ids]
    # Subtract the largest logit before the division, so that a tiny temperature cannot overflow.
    # In place, because fresh memory pages cost more than the arithmetic.
    weights = logits.astype(np.float64)
    weights -= float(logits.max())
    with np.errstate(over="ignore"):  # an overflow to -inf gives weight 0, as it should
        weights /= params.temperature
    np.exp(weights, out=weights)
    keep: NDArray[np.bool_] | None = None
    if params.top_p < 1.0:
        keep = _nucleus(logits, weights, params.top_p)
    if params.min_p > 0.0:
        likely = weights >= params.min_p
        keep = likely if keep is None else keep & likely
    if keep is not None:
        indices = np.flatnonzero(keep)
        return indices if ids is None else ids[indices], weights[indices]
    return ids, weights


def _largest(values: NDArray[np.floating[Any]], count: int) -> NDArray[np.int64]:
    """Ids of the `count` largest values, ascending."""
    least = np.partition(values, len(values) - count)[len(values) - count]
    return np.flatnonzero(_at_least(values, least, count))


def _at_least(
    values: NDArray[np.floating[Any]], least: np.floating[Any], count: int
) -> NDArray[np.bool_]:
    """Mask [N] of the `count` largest values, the smallest of which is `least`; ties to low ids."""
    keep: NDArray[np.bool_] = values >= least
    num_over = int(np.count_nonzero(keep)) - count
    if num_over > 0:
        keep[np.flatnonzero(values == least)[-num_over:]] = False
    return keep


def _nucleus(logits: Row, weights: NDArray[np.float64], top_p: float) -> NDArray[np.bool_]:
    """Mask [N] of the smallest set of likeliest tokens with `top_p` of the mass.

    The token that crosses the threshold is kept. Sorts values without ids, and only those near the
    largest if they have enough mass.
    """
    needed = top_p * weights.sum()
    near: Row = logits
    mass = weights
    for depth in NUCLEUS_DEPTHS:
        is_near = weights > np.exp(-depth)
        if weights[is_near].sum() >= needed:
            near, mass = logits[is_near], weights[is_near]
            break
    mass = np.cumsum(np.sort(mass)[::-1])  # weights rise with the logits: the order is the same
    last = min(int(np.searchsorted(mass, needed, side="left")), len(mass) - 1)
    return _at_least(logits, np.sort(near)[len(near) - 1 - last], last + 1)


def philox_uniform(seed: int, position: int, stream: int = 0) -> float:
    """A uniform number in [0, 1), a function of its arguments alone (Philox, counter-based)."""
    key, counter = np.array([seed, position], np.uint64), np.array([0, 0, 0, stream], np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())


def log_softmax(logits: Row) -> NDArray[np.float64]:
    """Natural-log probabilities [vocab_size] float64."""
    shifted = logits.astype(np.float64) - float(logits.max())
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result


def token_logprob(logits: Row, token: int, num_top: int) -> TokenLogprob:
    """Log probabilities of `token` and of the `num_top` likeliest, from the untransformed logits."""
    scores = log_softmax(logits)
    top: dict[int, float] = {}
    if num_top:
        likeliest = _largest(scores, min(num_top, len(scores)))
        for index in likeliest[np.lexsort((likeliest, -scores[likeliest]))]:
            top[int(index)] = float(scores[index])
    return TokenLogprob(token, float(scores[token]), top)
