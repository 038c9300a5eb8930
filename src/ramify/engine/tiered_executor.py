"""`TieredExecutor`: copies evicted pages out before each call that may overwrite them."""

from __future__ import annotations

from collections.abc import Sequence

from ramify.engine.step import Executor, StepPlan, StepResult
from ramify.engine.tiering import EngineTiering


class TieredExecutor:
    """An executor in front of which the tiers take their copies.

    Evictions happen within steps and between them, so no field of a `StepPlan` could name the pages.
    """

    def __init__(self, inner: Executor, tiering: EngineTiering) -> None:
        self.inner, self._tiering = inner, tiering

    def begin(self, plan: StepPlan) -> None:
        """See `Executor.begin`."""
        self._tiering.before_writes()
        self._tiering.copy_lazily()
        self.inner.begin(plan)

    def finish(self) -> StepResult:
        """See `Executor.finish`."""
        return self.inner.finish()

    def zero_pages(self, pages: Sequence[int]) -> None:
        """See `Executor.zero_pages`."""
        self._tiering.before_writes()
        self.inner.zero_pages(pages)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Executor.copy_pages`."""
        self._tiering.before_writes()
        self.inner.copy_pages(pairs)
