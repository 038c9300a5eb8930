"""Write the tables of options in docs/coming-from: what an option of another server is called here.

    python scripts/coming_from.py

The names are those of scripts/peer_options.py; what is used in their place is what `ramify serve` answers when it
is given one (src/ramify/foreign_names.py). Only the part of a page between the two comments is written.
`make options` runs this; tests/pure/test_coming_from.py fails when a page is not up to date.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from options_table import serve_parameters
from peer_options import PEERS, Peer

from ramify.cli.usage_errors import advice_for

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "coming-from"
BEGIN = "<!-- options: written by scripts/coming_from.py (make options) -->"
END = "<!-- end of options -->"
# A flag with its value, a parameter of a request, a variable of the environment, a command.
CODE = re.compile(
    r"(?<![\w`-])(?:--[a-z][a-z-]+(?: (?:[A-Z]+|auto|off|cuda)\b)?|structured=\S+|/[a-z]\S+|ramify\[\w+\]"
    r"|ramify \w+|[a-z]+_[a-z_]+\b|[A-Z]+(?:_[A-Z]+)+|(?<=per request: )[a-z]+)"
)


@functools.cache
def names_here() -> tuple[frozenset[str], frozenset[str]]:
    """Flags of `ramify serve`, and the names of its parameters."""
    parameters = serve_parameters()
    flags = (
        flag
        for parameter in parameters.values()
        for flag in (*parameter.opts, *parameter.secondary_opts)
    )
    return frozenset(flags), frozenset(parameters)


def answer(flag: str) -> str:
    """What to use in place of a flag, as a cell of a table.

    Raises:
        LookupError: there is no answer; src/ramify/foreign_names.py needs one.
    """
    flags, parameters = names_here()
    if flag in flags:
        return "the same"
    text = advice_for(flag, parameters)
    if not text:
        raise LookupError(f"foreign_names.py has no answer to {flag}")
    text = re.sub(r"a parameter of each request[;:] (use )?", "per request: ", text)
    text = text.removeprefix("use ").replace(" of ramify serve", "")
    if text.endswith("; leave it out"):
        text = f"leave it out: {text.removesuffix('; leave it out')}"
    return CODE.sub(lambda match: f"`{match[0]}`", text)


def rows(flags: list[str]) -> Iterator[str]:
    """Rows of a table; flags beside each other that have the same answer share a row."""
    for text, group in itertools.groupby(flags, key=answer):
        yield f"| {', '.join(f'`{flag}`' for flag in group)} | {text} |"


def table(peer: Peer) -> str:
    """The tables of a peer's options, by what they are for."""
    lines = [
        f"Names of `{peer.command}`, {peer.version}. `ramify serve` gives the same answers.",
        "",
    ]
    for title, flags in peer.options.items():
        lines += [f"### {title}", "", f"| `{peer.command}` | `ramify serve` |", "|---|---|"]
        lines += [*rows(flags.split()), ""]
    return "\n".join(lines)


def with_table(page: str, peer: Peer) -> str:
    """A page with its part between the two comments written anew."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise LookupError(f"docs/coming-from/{peer.page} lacks {BEGIN!r} or {END!r}")
    return f"{before}{BEGIN}\n\n{table(peer)}\n{END}{after}"


def main() -> None:
    """Write the pages."""
    for peer in PEERS:
        file = FOLDER / peer.page
        file.write_text(with_table(file.read_text(encoding="utf-8"), peer), encoding="utf-8")


if __name__ == "__main__":
    main()
