"""A bar on stderr while many prompts are answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ramify.outputs import RequestOutput


@contextmanager
def progress_bar(total: int, wanted: bool | None) -> Iterator[Callable[[RequestOutput], None]]:
    """Yields what counts an output.

    Args:
        total: prompts.
        wanted: None shows the bar for two prompts or more, if stderr is a terminal; True always,
            where there is no terminal as one line at the end.
    """
    if wanted is False or (wanted is None and total < 2):
        yield lambda output: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if wanted is None and not console.is_terminal:
        yield lambda output: None
        return
    tokens, cached, prompt = 0, 0, 0
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[told]}"),
        console=console,
    ) as bar:
        task = bar.add_task("answers", total=total, told="")

        def count(output: RequestOutput) -> None:
            nonlocal tokens, cached, prompt
            tokens += output.usage.completion_tokens
            cached += output.usage.cached_tokens
            prompt += output.usage.prompt_tokens
            share = f", {cached / prompt:.0%} of the prompts cached" if prompt else ""
            bar.update(task, advance=1, told=f"{tokens:,} tokens{share}")

        yield count
