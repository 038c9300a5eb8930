"""Sample the tokens of a step on the device: logits stay there, ids and flags come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ramify.engine.execution.device_draws import DrawOptions, draw_tokens, philox_uniforms
from ramify.engine.execution.device_transforms import TransformedRow, apply_transforms
from ramify.engine.execution.host_copies import to_device
from ramify.engine.step import SampledTokens, SampleSpec
from ramify.outputs import TokenLogprob


@dataclass(frozen=True, slots=True, eq=False)
class SampledRows:
    """What the rows of a step's samples gave, on their device: R rows, in the order of the specs."""

    tokens: Tensor  # [R] int64
    are_finite: Tensor  # [R] bool, the logits as the model computed them
    are_allowed: Tensor  # [R] bool: a token is left after the transforms
    # Of the rows that report them, see `log_probabilities`.
    scores: tuple[Tensor, Tensor, Tensor] | None = None


def sample_rows(logits: Tensor, specs: Sequence[SampleSpec], *, by_rejection: bool) -> SampledRows:
    """Draw a token from each row.

    Args:
        logits: [R, vocab_size] float32, 1 + len(spec.draft) rows for each spec; overwritten.
        by_rejection: draft tokens are accepted by rejection sampling.
    """
    if are_greedy(specs):
        return greedy_rows(logits)
    are_finite = _are_finite(logits)
    rows = rows_of(specs)
    reporting = [row for row, spec, _ in rows if spec.num_logprobs is not None]
    scores = logits[_indices(reporting, logits)] if reporting else None
    transformed: list[TransformedRow] = [
        (row, spec.logits, num_drafts)
        for row, spec, num_drafts in rows
        if spec.logits is not None and num_drafts < spec.logits.num_rows
    ]
    are_allowed = are_finite
    if transformed:
        apply_transforms(logits, transformed)
        are_allowed = logits.amax(1).isfinite()
    tokens = logits.argmax(1)  # of equals the lowest id
    drawn = [(row, spec, at) for row, spec, at in rows if spec.params.temperature > 0.0]
    if drawn:
        is_all = len(drawn) == len(tokens)
        index = None if is_all else _indices([row for row, _, _ in drawn], logits)
        chosen = logits if index is None else logits[index]
        options, drafts = _draw_options(chosen, drawn, by_rejection=by_rejection)
        sampled = draw_tokens(chosen, options, drafts)
        tokens = sampled if index is None else tokens.index_copy(0, index, sampled)
    if scores is None:
        return SampledRows(tokens, are_finite, are_allowed)
    num_top = max(spec.num_logprobs or 0 for spec in specs)
    reported = log_probabilities(scores, tokens[_indices(reporting, logits)], num_top)
    return SampledRows(tokens, are_finite, are_allowed, reported)


def are_greedy(specs: Sequence[SampleSpec]) -> bool:
    """Whether all that is needed of each row is its likeliest token."""
    for spec in specs:
        if (
            spec.params.temperature != 0.0
            or spec.num_logprobs is not None
            or spec.logits is not None
        ):
            return False
    return True


def greedy_rows(logits: Tensor) -> SampledRows:
    """The likeliest token of each row of logits [R, vocab_size], of equals the lowest id."""
    are_finite = _are_finite(logits)
    return SampledRows(logits.argmax(1), are_finite, are_finite)


def _are_finite(logits: Tensor) -> Tensor:
    return logits.amax(1).isfinite()  # a NaN is larger than all numbers


def log_probabilities(
    logits: Tensor, tokens: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Log probabilities of `tokens` [L], and ids and values of the likeliest [L, num_top].

    Args:
        logits: [L, vocab_size] float32.
    """
    shifted = logits.double()
    shifted -= shifted.amax(1, keepdim=True)
    scores = shifted - row_sums(shifted.exp())[:, None].log()
    num_top = min(num_top, scores.shape[1])
    if num_top:
        top = torch.sort(scores, dim=1, descending=True, stable=True)
        ids, values = top.indices[:, :num_top], top.values[:, :num_top]
    else:
        ids, values = tokens.new_empty(len(tokens), 0), scores.new_empty(len(tokens), 0)
    return scores.gather(1, tokens[:, None])[:, 0], ids, values


def row_sums(values: Tensor) -> Tensor:
    """Sum of each row of `values` [R, N], by halves: [R]. Overwrites `values`.

    The bits of a row's sum are the same whatever rows are beside it. Those of torch's `sum` are not:
    it splits a long row between threads, or blocks, if there are few.
    """
    while (width := values.shape[1]) > 1:
        half = width // 2
        values[:, :half] += values[:, width - half :]
        values = values[:, : width - half]
    return values[:, 0]


def collect_samples(
    rows: SampledRows, specs: Sequence[SampleSpec]
) -> tuple[dict[int, SampledTokens], dict[int, str]]:
    """Sampled tokens by request id, and why others have none, from rows that are on the host."""
    sampled: dict[int, SampledTokens] = {}
    failed: dict[int, str] = {}
    tokens, are_finite = rows.tokens.tolist(), rows.are_finite.tolist()
    are_allowed = rows.are_allowed.tolist()
    if len(tokens) == len(specs) and rows.scores is None and all(are_finite) and all(are_allowed):
        ids = [spec.request_id for spec in specs]
        return dict(zip(ids, map(SampledTokens, zip(tokens, strict=True)), strict=True)), {}
    start = num_reported = 0
    for spec in specs:
        num_rows = len(spec.draft) + 1
        first_reported = num_reported
        if spec.num_logprobs is not None:
            num_reported += num_rows
        row, accepted = start, list[int]()
        start += num_rows
        reachable = num_rows if spec.logits is None else spec.logits.num_rows
        for at in range(reachable):
            if not (are_finite[row + at] and are_allowed[row + at]):
                failed[spec.request_id] = _problem(spec, at, is_finite=are_finite[row + at])
                break
            accepted.append(tokens[row + at])
            if at < len(spec.draft) and accepted[-1] != spec.draft[at]:
                break
        if spec.request_id not in failed:
            logprobs = _logprobs(rows, spec, accepted, first_reported)
            sampled[spec.request_id] = SampledTokens(tuple(accepted), logprobs)
    return sampled, failed


def _problem(spec: SampleSpec, row: int, *, is_finite: bool) -> str:
    position = spec.position + row
    if not is_finite:
        return (
            f"the logits of request {spec.request_id} at position {position} are not finite; the "
            "weights or the K/V are damaged"
        )
    return (
        f"no token is left for request {spec.request_id} at position {position}: the scores of all "
        "that are allowed are not finite"
    )


def _logprobs(
    rows: SampledRows, spec: SampleSpec, ids: list[int], first: int
) -> tuple[TokenLogprob, ...]:
    if spec.num_logprobs is None or rows.scores is None:
        return ()
    num_top = spec.num_logprobs
    return tuple(
        [token_logprob_of(rows.scores, first + at, token, num_top) for at, token in enumerate(ids)]
    )


def token_logprob_of(
    scores: tuple[Tensor, Tensor, Tensor], row: int, token: int, num_top: int
) -> TokenLogprob:
    """The log probability of a token from a row of `log_probabilities`, on the host."""
    logprobs, top_ids, top_logprobs = scores
    ids, values = top_ids[row, :num_top].tolist(), top_logprobs[row, :num_top].tolist()
    return TokenLogprob(token, float(logprobs[row]), dict(zip(ids, values, strict=True)))


def rows_of(specs: Sequence[SampleSpec]) -> list[tuple[int, SampleSpec, int]]:
    """(row, its spec, number of draft tokens before it) of every row."""
    rows: list[tuple[int, SampleSpec, int]] = []
    for spec in specs:
        for at in range(len(spec.draft) + 1):
            rows.append((len(rows), spec, at))
    return rows


def _draw_options(
    logits: Tensor, rows: Sequence[tuple[int, SampleSpec, int]], *, by_rejection: bool
) -> tuple[DrawOptions, Tensor | None]:
    """Columns of the rows' options, by one upload of integers and one of numbers; their drafts."""
    width, device = logits.shape[1], logits.device
    params = [spec.params for _, spec, _ in rows]
    drafts = [spec.draft[at] if at < len(spec.draft) else -1 for _, spec, at in rows]
    by_rejection = by_rejection and max(drafts) >= 0
    # A number that accepts a draft token has a stream of its own, see `sampler.sample_token`.
    streams = [
        1 + spec.request_id if by_rejection and draft >= 0 else 0
        for (_, spec, _), draft in zip(rows, drafts, strict=True)
    ]
    top_ks = [width if p.top_k is None else min(p.top_k, width) for p in params]
    seeds = np.array([spec.seed for _, spec, _ in rows], np.uint64).view(np.int64)
    positions = [spec.position + at for _, spec, at in rows]
    integers = to_device(np.array([seeds, positions, streams, top_ks, drafts], np.int64), device)
    reals = [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]]
    columns = to_device(np.array(reals, np.float64), device)
    options = DrawOptions(
        columns[0][:, None],
        philox_uniforms(integers[0], integers[1], integers[2]),
        integers[3][:, None] if min(top_ks) < width else None,
        columns[1][:, None] if min(reals[1]) < 1.0 else None,
        columns[2][:, None] if max(reals[2]) > 0.0 else None,
    )
    return options, integers[4] if by_rejection else None


def _indices(rows: list[int], like: Tensor) -> Tensor:
    return to_device(np.array(rows, np.int64), like.device)
