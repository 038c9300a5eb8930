"""Rejection sampling: another way than equality to decide about a guess."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ramify.engine.execution.sampler import sample_from_cdf


def rejection_sample(
    ids: NDArray[np.int64] | None,
    weights: NDArray[np.float64],
    number: float,
    draft_token: int | None,
) -> int:
    """The guess with its probability, else one of the other tokens in proportion to theirs.

    Speculative sampling (Leviathan et al. 2023; Chen et al. 2023) for a guess that was not drawn
    from a distribution, so that its own is all on one token: it is accepted with the probability p
    that the target gives it, and rejected in favour of the target without it, renormalised. One
    number in [0, 1) decides both: below p it accepts, and what is above p is uniform again.

    The tokens have the target's distribution, but depend on what was guessed: the same seed gives
    other tokens with other guesses. `sampler.sample_from_cdf` is equal to the guess with the same
    probability p, so that it accepts as often, and depends on nothing but seed and position.

    Args: as for `sampler.sample_from_cdf`.
    """
    ids = np.arange(len(weights)) if ids is None else ids
    is_guess = ids == (-1 if draft_token is None else draft_token)
    if not is_guess.any():
        return sample_from_cdf(ids, weights, number, None)
    share = float(weights[is_guess][0] / weights.sum())
    others = weights[~is_guess]
    if number < share or not others.any():
        return int(ids[is_guess][0])
    return sample_from_cdf(ids[~is_guess], others, (number - share) / (1.0 - share), None)
