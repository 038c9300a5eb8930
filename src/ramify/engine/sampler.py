"""Logits to tokens and log probabilities, one row at a time in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ramify.engine.step import Draw, Drawn
from ramify.params import TokenLogprob

Row = NDArray[np.float32]  # [vocab_size]


def draw_tokens(logits: NDArray[np.float32], draw: Draw) -> Drawn:
    """The next token, and one more for as long as the drafts are what was drawn.

    Args:
        logits: [1 + number of drafts, vocab_size], after what is known and after each draft.

    Raises:
        FloatingPointError: logits are not numbers.
    """
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    for place, row in enumerate(logits):
        if not np.isfinite(row.max()):
            raise FloatingPointError(
                f"the logits of request {draw.request_id} at position {draw.position + place} "
                "are not finite; the weights or the K/V are damaged"
            )
        token = draw_token(row, draw, draw.position + place)
        tokens.append(token)
        if draw.num_logprobs is not None:
            logprobs.append(token_logprob(row, token, draw.num_logprobs))
        if place < len(draw.draft) and token != draw.draft[place]:
            break
    return Drawn(tuple(tokens), tuple(logprobs))


def draw_token(logits: Row, draw: Draw, position: int) -> int:
    """The token for one position. Equal logits go to the lowest id.

    Temperature 0 is the likeliest token. Otherwise the likeliest `top_k` are kept, then the
    smallest set of them with a mass of at least `top_p`, and one is drawn by inverting the
    cumulative distribution with a number that depends on (seed, position) alone.
    """
    if draw.params.temperature == 0.0:
        return int(logits.argmax())
    # the largest logit goes to 0 before the division: a tiny temperature must not overflow
    with np.errstate(over="ignore"):  # towards -inf is where the others belong
        scaled = (logits.astype(np.float64) - float(logits.max())) / draw.params.temperature
    order = np.argsort(-scaled, kind="stable")
    if draw.params.top_k is not None:
        order = order[: draw.params.top_k]
    weights = np.exp(scaled[order])
    mass = np.cumsum(weights)
    if draw.params.top_p < 1.0:
        # the token that crosses the threshold is kept
        last = int(np.searchsorted(mass, draw.params.top_p * mass[-1], side="left"))
        mass = mass[: last + 1]
    place = int(np.searchsorted(mass, uniform(draw.seed, position) * mass[-1], side="right"))
    return int(order[min(place, len(mass) - 1)])


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on its arguments only (Philox, counter-based)."""
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, position], np.uint64)))
    return float(generator.random())


def log_softmax(logits: Row) -> NDArray[np.float64]:
    """Natural-log probabilities [vocab_size]."""
    shifted = logits.astype(np.float64) - float(logits.max())
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result


def token_logprob(logits: Row, token: int, num_top: int) -> TokenLogprob:
    """Log probability of `token`, and of the `num_top` likeliest, before any temperature."""
    scores = log_softmax(logits)
    top: dict[int, float] = {}
    if num_top:
        count = min(num_top, len(scores))
        least = np.partition(scores, len(scores) - count)[len(scores) - count]
        found = np.flatnonzero(scores >= least)  # more than count, if several are equal to it
        for index in found[np.lexsort((found, -scores[found]))][:count]:
            top[int(index)] = float(scores[index])
    return TokenLogprob(token, float(scores[token]), top)
