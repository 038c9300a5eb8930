"""The runners of tensor parallelism: `RankRunner` of every rank, `LeadRunner` of rank 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ramify.attention.paged import PagedBackend
from ramify.engine.execution.runner import ModelRunner
from ramify.engine.step import StepPlan
from ramify.kv.pool import KVPool
from ramify.models.decoders.decoder import CausalDecoder
from ramify.models.ops.sharded.rank_group import RankGroup
from ramify.params import SamplingParams

T = TypeVar("T")
_ANY_PARAMS = SamplingParams()


class RankRunner(ModelRunner):
    """A rank's part of the model and of the K/V, by the same page ids as on every other rank."""

    def __init__(
        self, model: CausalDecoder, pool: KVPool, backend: PagedBackend, group: RankGroup
    ) -> None:
        super().__init__(model, pool, backend)
        self._group = group
        self._hidden: Tensor | None = None  # of the last step

    def follow(self, order: str, *arguments: Any) -> None:
        """Make the call of rank 0 that an order is of, on the rows of the last step."""
        if order == "forward":
            [plan] = arguments
            self._hidden = super().forward(plan)
        elif order == "logits":
            super().logits(self._last_hidden, *arguments)
        elif order == "nonfinite_rows":
            self.nonfinite_on_any_rank(self._last_hidden)
        elif order == "zero_pages":
            super().zero_pages(*arguments)
        else:
            assert order == "copy_pages", order
            super().copy_pages(*arguments)

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self._group.rank

    @property
    def _last_hidden(self) -> Tensor:
        assert self._hidden is not None, "no step before"
        return self._hidden

    @torch.inference_mode()
    def nonfinite_on_any_rank(self, hidden: Tensor) -> list[int]:
        """Indices, ascending, of rows that have an inf or NaN on a rank: each sees its own K/V only."""
        flags = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
        flags[super().nonfinite_rows(hidden)] = True
        rows: list[int] = torch.nonzero(self._group.any(flags))[:, 0].tolist()
        return rows


class Followers(Protocol):
    """The other ranks, as rank 0 orders them."""

    def call(self, order: str, arguments: tuple[Any, ...], own: Callable[[], T]) -> T:
        """Order every other rank to do something, do the same, return what came of that here.

        Raises:
            RankLostError: a rank has gone, does not answer, or has raised; the engine has ended.
        """
        ...


class LeadRunner(RankRunner):
    """The runner of rank 0: every call is made on all ranks.

    Args:
        followers: the others, whose pools and parts of the model are ready.
    """

    def __init__(
        self,
        model: CausalDecoder,
        pool: KVPool,
        backend: PagedBackend,
        group: RankGroup,
        followers: Followers,
    ) -> None:
        super().__init__(model, pool, backend, group)
        self._followers = followers

    def forward(self, plan: StepPlan, late_ids: Tensor | None = None) -> Tensor:
        """See `ModelRunner.forward`; a plan of ranks has no late tokens."""
        assert late_ids is None, "ranks run no step ahead on a device"
        own = partial(super().forward, plan)
        self._hidden = self._followers.call("forward", (_without_sampling(plan),), own)
        return self._hidden

    def logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        """See `ModelRunner.logits`, on the host; `hidden` is that of the last step."""
        assert hidden is self._hidden, "rows of another step"
        compute = super().logits
        # On the host: the wait for a device is part of the call, whose limit then covers the step.
        return self._followers.call("logits", ([*rows],), lambda: compute(hidden, rows).cpu())

    def nonfinite_rows(self, hidden: Tensor) -> list[int]:
        """See `ModelRunner.nonfinite_rows`; `hidden` is that of the last step."""
        assert hidden is self._hidden, "rows of another step"
        own = partial(self.nonfinite_on_any_rank, hidden)
        return self._followers.call("nonfinite_rows", (), own)

    def zero_pages(self, pages: Sequence[int]) -> None:
        """See `ModelRunner.zero_pages`."""
        own = partial(super().zero_pages, pages)
        self._followers.call("zero_pages", ([*pages],), own)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `ModelRunner.copy_pages`."""
        own = partial(super().copy_pages, pairs)
        self._followers.call("copy_pages", ([*pairs],), own)


def _without_sampling(plan: StepPlan) -> StepPlan:
    """The plan without what only sampling reads: masks of grammars are large."""
    samples = (
        spec._replace(params=_ANY_PARAMS, num_logprobs=None, logits=None) for spec in plan.samples
    )
    return replace(plan, samples=tuple(samples), prompt_logprobs=(), embeddings=())
