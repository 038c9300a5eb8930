"""`analyze`: everything about a log in one value, which the report draws."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path

import ramify
from ramify.analysis.corpus import Corpus
from ramify.analysis.linting import lint_parts
from ramify.analysis.log_files import read_log
from ramify.analysis.progress import Progress
from ramify.analysis.reader import ReadQuality
from ramify.analysis.report.document import Analysis
from ramify.analysis.report.figures.cache_curves import cache_curves
from ramify.analysis.report.figures.prefix_tree import PrefixTreeBuilder
from ramify.analysis.report.figures.quality_warnings import warnings_of
from ramify.analysis.report.figures.rates import hit_rates, possible_reads, waterfall
from ramify.analysis.report.figures.reads import measure_reads
from ramify.analysis.report.figures.sessions import session_timelines
from ramify.errors import LogError

Paths = str | PathLike[str] | Iterable[str | PathLike[str]]

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
    linted = lint_parts(
        corpus,
        quality=quality,
        provider=provider,
        rules=rules,
        capacity=capacity,
        progress=progress,
    )
    lint, corpus, predictions = linted.report, linted.corpus, linted.predictions
    is_partial = bool(lint.interrupted) or INTERRUPTED in lint.quality["notes"]
    reads = measure_reads(corpus, lint.verdicts, predictions, linted.model.shared_as_sent())
    num_input = sum(verdict.tokens.total for verdict in lint.verdicts)
    num_possible = possible_reads(lint, reads)
    rates = hit_rates(lint, reads, num_possible)
    tree = PrefixTreeBuilder(corpus, reads.as_counted(corpus), lint.verdicts).build()
    curves = None
    try:
        curves = cache_curves(
            corpus,
            rates[0].share if rates else None,
            stated_tokens=lint.capacity_tokens,
            policies=policies,
            progress=progress,
        )
    except KeyboardInterrupt:
        is_partial = True
    starts = [request.info.start_s for request in corpus if request.info.start_s is not None]
    return Analysis(
        title=title,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        version=ramify.__version__,
        lint=lint,
        num_input=num_input,
        num_counted=lint.tables["predicted"]["num_input"],
        rates=rates,
        duration_s=max(starts) - min(starts) if len(starts) > 1 else None,
        tree=tree,
        sessions=session_timelines(corpus, lint.verdicts, predictions),
        curves=curves,
        waterfall=waterfall(reads, lint.verdicts, predictions, linted.unsplit, num_possible),
        warnings=tuple(warnings_of(lint.quality, lint, is_partial=is_partial)),
        is_partial=is_partial,
    )
