"""`ramify lint`: causes of lost cache hits in a log, with the verdict of each request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

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
    progress_bar,
    read_capacity,
    write_json,
)
from ramify.cli.options import exit_on_error
from ramify.counts import counted

if TYPE_CHECKING:
    from ramify.analysis.reader import ReadQuality
    from ramify.analysis.verdicts import LintReport


def lint(
    log: LogFiles,
    json_file: JsonFile = None,
    provider: CacheProvider = None,
    rules: CacheRules = None,
    capacity: ReplicaCapacity = None,
    model: SizedModel = None,
    log_format: LogFormat = None,
    strict: StrictLog = False,
) -> None:
    """Say why requests share less than they could, with proof, and what mending it saves."""
    with exit_on_error(), exit_on_interrupt():
        from ramify.analysis.lint_json import report_as_json
        from ramify.analysis.linting import lint as run_lint
        from ramify.analysis.reader import ReadQuality

        check_outputs(log, (json_file,))
        num_tokens = read_capacity(capacity, model)
        quality = ReadQuality()
        with progress_bar() as progress:
            report = run_lint(
                log,
                provider=provider,
                rules=rules,
                capacity=num_tokens,
                format=log_format,
                strict=strict,
                progress=progress,
                quality=quality,
            )
        if json_file is not None:
            write_json(json_file, report_as_json(report))
        if not report.num_requests:
            _warn_of_empty(quality, strict=strict)
            return
    if str(json_file) != "-":
        _show(report)
    if report.interrupted:
        exit_interrupted(report.interrupted)


def _warn_of_empty(quality: ReadQuality, *, strict: bool) -> None:
    """Say on stderr what the log holds in place of requests; `strict` makes it an error."""
    from ramify.errors import LogError

    message = f"the log has no requests: {quality.why_empty()}"
    if strict:
        raise LogError(message)
    typer.echo(f"warning: {message}", err=True)
    _show_bad_lines(quality.bad_lines)


def _show(report: LintReport) -> None:
    from ramify.analysis.report.wording.numbers import observed_words
    from ramify.analysis.simulation.capacities import capacity_label

    verdicts = report.verdicts
    total = sum(verdict.tokens.total for verdict in verdicts)
    reusable = sum(verdict.tokens.reusable for verdict in verdicts)
    lost = sum(verdict.tokens.lost for verdict in verdicts)
    note = "" if report.quality.get("is_exact") else ", estimated"
    rule = f"rule of {report.provider}"
    if report.capacity_tokens is not None:
        rule += f" at {capacity_label(report.capacity_tokens)} tokens of capacity"
    typer.echo(
        f"{counted(report.num_requests, 'request')}, {counted(total, 'input token')}{note}; {rule}"
    )
    num_whole = report.quality.get("num_with_full_text", report.num_requests)
    if num_whole < report.num_requests:
        typer.echo(
            f"{counted(report.num_requests - num_whole, 'request')} not logged whole (system prompt, tools "
            "or parts of the text are missing): what follows is about the logged parts"
        )
    if total:
        typer.echo(f"shared with the best match as sent: {reusable:,} ({reusable / total:.1%})")
        typer.echo(f"lost to causes that can be mended:  {lost:,} ({lost / total:.1%})")
    for finding in report.findings:
        place = f" at {finding.segment}" if finding.segment else ""
        typer.echo("")
        typer.echo(
            f"{finding.cause}{place} ({finding.certainty}): "
            f"{counted(finding.num_requests, 'request')}, {counted(finding.tokens_lost, 'token')} lost, "
            f"mending saves {finding.saving.tokens:,}"
        )
        example = finding.example
        had, got = (json.dumps(text, ensure_ascii=False) for text in (example.had, example.got))
        typer.echo(f"  line {example.line}: {had} → {got}")
        if finding.note:
            typer.echo(f"  {finding.note}")
        typer.echo(f"  {finding.change}")
    for item in report.observations:
        typer.echo("")
        typer.echo(f"no finding, {item.cause} ({item.certainty}): {observed_words(item)}")
    if num_empty := report.quality.get("num_without_tokens", 0):
        file, line = report.quality["lines_without_tokens"][0]
        typer.echo(
            f"\n{counted(num_empty, 'request')} without prompt and counts, e.g. {file}:{line}",
            err=True,
        )
    _show_bad_lines(report.quality.get("bad_lines", []))


def _show_bad_lines(bad: Sequence[Sequence[str | int]]) -> None:
    if bad:
        shown = ", ".join(f"{file}:{line}" for file, line in bad[:5])
        typer.echo(
            f"\n{counted(len(bad), 'bad line')}: {shown}{' …' if len(bad) > 5 else ''}", err=True
        )
