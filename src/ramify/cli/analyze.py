"""`ramify analyze`: report on the cache hits of a log, lost hits and what mending them saves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ramify.cli.log_commands import (
    CacheProvider,
    CacheRules,
    JsonFile,
    LogFiles,
    LogFormat,
    ReplicaCapacity,
    SizedModel,
    StrictLog,
    check_outputs,
    exit_interrupted,
    exit_on_interrupt,
    opened,
    progress_bar,
    read_capacity,
    write_json,
    write_text,
)
from ramify.cli.options import exit_on_error

OVER_BUDGET = 1  # exit code


def analyze(
    log: LogFiles,
    html: Annotated[Path | None, typer.Option(help="Write the report as one HTML file.")] = None,
    json_file: JsonFile = None,
    markdown: Annotated[Path | None, typer.Option(help="Write a summary as Markdown.")] = None,
    budget: Annotated[
        Path | None, typer.Option(help="TOML file of limits; over them the exit code is 1.")
    ] = None,
    diff: Annotated[
        Path | None, typer.Option(help="JSON of an earlier run (--json), to compare with.")
    ] = None,
    export_trace: Annotated[
        Path | None, typer.Option(help="Write an anonymous Mooncake trace: no text, no names.")
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="No text of the log in any output.")
    ] = False,
    title: Annotated[str | None, typer.Option(help="Of the report. By default the file.")] = None,
    policy: Annotated[
        str, typer.Option(help="Eviction policies to replay for the capacity chart: lru,auto.")
    ] = "",
    provider: CacheProvider = None,
    rules: CacheRules = None,
    capacity: ReplicaCapacity = None,
    model: SizedModel = None,
    log_format: LogFormat = None,
    strict: StrictLog = False,
) -> None:
    """Report what a log's requests share, why hits are lost, and what a change would save."""
    with exit_on_error(), exit_on_interrupt():
        from rich.console import Console

        from ramify.analysis.reader import ReadQuality
        from ramify.analysis.report.analyze import analyze as run_analysis
        from ramify.analysis.report.analyze import read_corpus
        from ramify.analysis.report.budget import check_budget, read_budget
        from ramify.analysis.report.comparison import print_comparison, read_earlier
        from ramify.analysis.report.page.html import analysis_as_html
        from ramify.analysis.report.privacy import hide_texts
        from ramify.analysis.report.writers.as_json import analysis_as_json
        from ramify.analysis.report.writers.markdown import analysis_as_markdown
        from ramify.analysis.report.writers.terminal import print_summary
        from ramify.analysis.report.writers.trace_export import write_trace

        outputs = (html, json_file, markdown, export_trace)
        check_outputs(log, outputs)
        limits = None if budget is None else read_budget(budget)
        earlier = None if diff is None else read_earlier(diff)
        num_tokens = read_capacity(capacity, model)
        quality = ReadQuality()
        with progress_bar() as progress:
            corpus = read_corpus(log, quality, format=log_format, strict=strict, progress=progress)
            analysis = run_analysis(
                corpus,
                title=title or _title(log),
                quality=quality,
                provider=provider,
                rules=rules,
                capacity=num_tokens,
                policies=tuple(name.strip() for name in policy.split(",") if name.strip()),
                progress=progress,
            )
        if private:
            analysis = hide_texts(analysis)
        for path, as_text in ((html, analysis_as_html), (markdown, analysis_as_markdown)):
            if path is not None:
                write_text(path, as_text(analysis))
        if json_file is not None:
            write_json(json_file, analysis_as_json(analysis))
        if export_trace is not None:
            with opened(export_trace) as out:
                write_trace(corpus, out)
        console = Console(stderr=Path("-") in outputs, highlight=False)
        print_summary(analysis, console)
        if earlier is not None:
            print_comparison(earlier, analysis_as_json(analysis), console)
        reasons = () if limits is None else check_budget(limits, analysis)
    for reason in reasons:
        typer.echo(f"over budget: {reason}", err=True)
    if analysis.is_partial:
        exit_interrupted(analysis.lint.interrupted or "requests or parts of the report are missing")
    if reasons:
        raise typer.Exit(OVER_BUDGET)


def _title(logs: list[Path]) -> str:
    first = "standard input" if str(logs[0]) == "-" else logs[0].name
    return first if len(logs) == 1 else f"{first} and {len(logs) - 1} more"
