"""`analyze`: everything about a log in one value, which the report draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import TypeVar

import ramify
from ramify.analysis.corpus import Corpus
from ramify.analysis.linting import Linted, lint_parts
from ramify.analysis.log_files import read_log
from ramify.analysis.progress import Progress, ignore_progress
from ramify.analysis.reader import ReadQuality
from ramify.analysis.report.document import Analysis
from ramify.analysis.report.figures.cache_curves import cache_curves
from ramify.analysis.report.figures.prefix_tree import PrefixTreeBuilder, leaders
from ramify.analysis.report.figures.provenance import figures_of, warnings_of
from ramify.analysis.report.figures.rates import hit_rates, possible_reads, waterfall
from ramify.analysis.report.figures.reads import measure_reads
from ramify.analysis.report.figures.sessions import session_timelines
from ramify.analysis.report.figures.what_if import replay_sets
from ramify.errors import LogError

Paths = str | PathLike[str] | Iterable[str | PathLike[str]]
Part = TypeVar("Part")

INTERRUPTED = "interrupted: the rest of the log is missing"


def read_corpus(
    paths: Paths,
    quality: ReadQuality,
    *,
    format: str | None = None,  # noqa: A002 - the word of the command line
    strict: bool = False,
    progress: Progress | None = None,
) -> Corpus:
    """The requests of files; Ctrl-C keeps those that were read.

    Raises:
        LogError: a file cannot be read, or no row is a request.
    """

    def advance(done: int, total: int | None) -> None:
        if progress is not None:
            progress("reading", done, total or 0)

    corpus = Corpus()
    try:
        for request in read_log(
            paths, format=format, quality=quality, strict=strict, progress=advance
        ):
            corpus.add(request)
    except KeyboardInterrupt:
        if not len(corpus):
            raise
        quality.notes[INTERRUPTED] += 1
    if not len(corpus):
        raise LogError(f"the log has no requests: {quality.why_empty()}")
    return corpus


def analyze(
    corpus: Corpus,
    *,
    title: str,
    quality: ReadQuality | None = None,
    provider: str | None = None,
    rules: Path | None = None,
    capacity: str | int | None = None,
    policies: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> Analysis:
    """All parts of the report. Ctrl-C leaves out requests, savings or parts that are not complete.

    Args:
        corpus: the requests.
        title: what the log is called.
        quality: what was read and what was not.
        provider: whose cache rule predicts reads; by default that of the log.
        rules: file of rules and prices, before the built-in ones.
        capacity: of each replica's cache, for predicted reads and savings; None: nothing is evicted.
        policies: eviction policies that `PrefixCache` replays for the capacity chart.
        progress: called now and then.

    Raises:
        KeyboardInterrupt: interrupted before a request was compared.
    """
    is_partial = quality is not None and INTERRUPTED in quality.notes
    linted = lint_parts(
        corpus,
        quality=quality,
        provider=provider,
        rules=rules,
        capacity=capacity,
        progress=progress,
    )
    is_partial |= bool(linted.report.interrupted)
    return _Parts(linted, progress, is_partial=is_partial).analysis(title, policies)


class _Parts:
    """Computes the parts of a report."""

    def __init__(self, linted: Linted, progress: Progress | None, *, is_partial: bool) -> None:
        self._corpus, self._linted, self._is_partial = linted.corpus, linted, is_partial
        self._progress: Progress = progress or ignore_progress

    def analysis(self, title: str, policies: tuple[str, ...]) -> Analysis:
        lint, predictions = self._linted.report, self._linted.predictions
        shared = self._linted.model.shared_as_sent()
        reads = measure_reads(self._corpus, lint.verdicts, predictions, shared)
        num_input = sum(verdict.tokens.total for verdict in lint.verdicts)
        self._progress("sets of fixes", 0, 1)
        what_if = None
        if not lint.interrupted:
            what_if = self._unless_interrupted(lambda: replay_sets(self._linted))
        num_possible = possible_reads(lint, reads, what_if)
        rates = hit_rates(lint, reads, num_possible)
        self._progress("sharing tree", 0, 1)
        counted = reads.as_counted(self._corpus)
        tree = PrefixTreeBuilder(self._corpus, counted, lint.verdicts).build()
        curves = self._unless_interrupted(
            lambda: cache_curves(
                self._corpus,
                rates[0].share if rates else None,
                stated_tokens=lint.capacity_tokens,
                policies=policies,
                progress=self._progress,
            )
        )
        return Analysis(
            title=title,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            version=ramify.__version__,
            lint=lint,
            num_input=num_input,
            num_counted=lint.tables["predicted"]["num_input"],
            rates=rates,
            duration_s=self._duration_s(),
            tree=tree,
            leaders=leaders(tree, int(counted.num_tokens.sum())),
            sessions=session_timelines(self._corpus, lint.verdicts, predictions),
            curves=curves,
            waterfall=waterfall(
                reads, lint.verdicts, predictions, self._linted.unsplit, num_possible
            ),
            what_if=what_if,
            figures=tuple(figures_of(lint, rates, curves, num_input)),
            warnings=tuple(warnings_of(lint.quality, lint, is_partial=self._is_partial)),
            is_partial=self._is_partial,
        )

    def _unless_interrupted(self, part: Callable[[], Part | None]) -> Part | None:
        """A part that a report can do without; Ctrl-C leaves it out."""
        try:
            return part()
        except KeyboardInterrupt:
            self._is_partial = True
            return None

    def _duration_s(self) -> float | None:
        starts = [
            request.info.start_s for request in self._corpus if request.info.start_s is not None
        ]
        return max(starts) - min(starts) if len(starts) > 1 else None
