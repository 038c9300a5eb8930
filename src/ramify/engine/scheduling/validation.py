"""Request validation: token ids and lengths, before anything is queued."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from ramify.config import ResolvedConfig
from ramify.counts import counted
from ramify.errors import (
    EmptyPromptError,
    InvalidParamsError,
    PromptTooLongError,
    RequestTooLargeError,
    TokenOutOfRangeError,
)
from ramify.params import SamplingParams


def validate_token_ids(token_ids: Sequence[int], vocab_size: int) -> array[int]:
    """The token ids as an array of int32.

    Raises:
        RequestError: no ids, or not all are integers in [0, vocab_size).
    """
    if isinstance(token_ids, str | bytes) or not isinstance(token_ids, Iterable):
        raise InvalidParamsError("prompt", token_ids, "text or a sequence of token ids")
    ids = list(token_ids)
    if not ids:
        raise EmptyPromptError
    for kind in set(map(type, ids)):  # one or two types, however long the prompt
        if kind is bool or not issubclass(kind, int | np.integer):
            position = next(index for index, token in enumerate(ids) if type(token) is kind)
            raise InvalidParamsError(f"prompt[{position}]", ids[position], "an integer token id")
    if min(ids) < 0 or max(ids) >= vocab_size:
        position = next(index for index, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise TokenOutOfRangeError(int(ids[position]), position, vocab_size)
    return array("i", ids)


def resolve_max_len(num_prompt: int, params: SamplingParams, config: ResolvedConfig) -> int:
    """Maximum number of tokens of a request, prompt included.

    Raises:
        RequestError: the prompt fills the context, or the request would not fit in an empty pool.
    """
    limit = config.max_model_len
    if num_prompt >= limit:
        raise PromptTooLongError(num_prompt, limit)
    page_size, num_pages = config.page_size, config.num_pages
    if params.max_tokens is None:  # as long as context and pool allow
        max_len = min(limit, max(num_prompt, config.max_table_pages * page_size) + 1)
    else:
        # With `max_tokens=0` the last token of the prompt still needs K/V.
        max_len = min(limit, num_prompt + max(params.max_tokens, 1))
    # the last token's K/V is never needed
    needed = config.num_live_pages(max_len - 1)
    if needed > num_pages:
        raise RequestTooLargeError(
            num_prompt,
            max_len - num_prompt,
            needed,
            num_pages,
            page_size,
            max_step=config.max_window_step,
        )
    return max_len


def validate_generated(
    generated: Sequence[Sequence[int]], params: SamplingParams, max_tokens: int, vocab_size: int
) -> list[array[int]]:
    """Token ids that were generated before, by answer; empty if there are none.

    Args:
        max_tokens: output tokens of an answer at most.

    Raises:
        RequestError: more answers than `params.n`, more tokens than `max_tokens`, tokens of a later
            answer only, or not all are integers in [0, vocab_size).
    """
    if not isinstance(generated, list | tuple) or len(generated) > params.n:
        raise InvalidParamsError(
            "generated", generated, f"a list of token ids for each of n={params.n} answers"
        )
    answers = [validate_token_ids(ids, vocab_size) if len(ids) else array("i") for ids in generated]
    if not any(answers):
        return []
    if not answers[0]:
        allowed = "tokens of the first answer too: all answers begin in one step"
        raise InvalidParamsError("generated", "tokens of a later answer only", allowed)
    longest = max(map(len, answers))
    if longest > max_tokens:
        allowed = f"at most {counted(max_tokens, 'token')}, the most that an answer may have"
        raise InvalidParamsError("generated", counted(longest, "token"), allowed)
    return answers


def validate_token_options(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidParamsError if an option names a token id that is not below `vocab_size`."""
    allowed = f"of token ids in 0..{vocab_size - 1}, those of this model"
    for name, ids in (
        # The first two are sorted.
        ("logit_bias", [token for token, _ in (*params.logit_bias,)[-1:]]),
        ("allowed_token_ids", (params.allowed_token_ids or ())[-1:]),
        ("banned_sequences", [*chain(*params.banned_sequences)]),
    ):
        if ids and max(ids) >= vocab_size:
            raise InvalidParamsError(name, max(ids), allowed)
