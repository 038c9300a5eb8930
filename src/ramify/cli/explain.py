"""`ramify explain`: how one request differs from another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ramify.cli.log_commands import JsonFile, write_json
from ramify.cli.options import exit_on_error

if TYPE_CHECKING:
    from ramify.analysis.explaining import Explanation


def explain(
    earlier: Annotated[Path, typer.Argument(help="File with a request, or FILE:LINE of a log.")],
    later: Annotated[Path, typer.Argument(help="The request that is compared with it.")],
    json_file: JsonFile = None,
) -> None:
    """Show where a request first differs from another, and what differs after that."""
    with exit_on_error():
        from ramify.analysis.explaining import explain as compare
        from ramify.analysis.explaining import explanation_as_json

        explanation = compare(earlier, later)
        if json_file is not None:
            write_json(json_file, explanation_as_json(explanation))
            if str(json_file) == "-":
                return
    _show(explanation)


def _show(explanation: Explanation) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ramify.analysis.findings import rule_advice

    about = "" if explanation.is_exact else "about "
    typer.echo(
        f"{about}{explanation.shared_as_sent:,} of {explanation.num_tokens_b:,} tokens are shared as "
        f"sent, {explanation.shared_if_mended:,} if the causes below are mended"
    )
    divergence = explanation.divergence
    if divergence is None:
        typer.echo("no difference: one prompt is the start of the other")
        return
    typer.echo(
        f"first difference: {divergence.segment}, character {divergence.char:,}, "
        f"token {divergence.token:,}"
    )
    table = Table("where", "cause", "earlier", "later", show_lines=True)
    rows = [
        (item.segment, f"{item.cause} ({item.certainty})", item.had, item.got)
        for item in explanation.differences
    ]
    if not any(row[0] == divergence.segment for row in rows):
        rows.insert(0, (divergence.segment, "new content", divergence.had, divergence.got))
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)
    for rule in dict.fromkeys(item.rule for item in explanation.differences if item.rule):
        typer.echo(f"{rule}: {rule_advice(rule)}")
