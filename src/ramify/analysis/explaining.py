"""`explain`: how a request differs from another, from the first difference to the last."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ramify.analysis.compare.comparing import Comparer
from ramify.analysis.corpus import Corpus
from ramify.analysis.lint_json import cause_as_json
from ramify.analysis.linting import learn_templates
from ramify.analysis.log_files import read_log
from ramify.analysis.records import LoggedRequest
from ramify.analysis.tokens import Tokenizer
from ramify.analysis.verdicts import SCHEMA, Cause, Divergence
from ramify.errors import LogError


@dataclass(frozen=True, slots=True)
class Explanation:
    """Two requests side by side."""

    num_tokens_a: int
    num_tokens_b: int
    shared_as_sent: int  # tokens of the common prefix
    shared_if_mended: int
    divergence: Divergence | None
    differences: tuple[Cause, ...]  # in order, each with what stands before it mended
    is_exact: bool  # False: token counts are estimates


def explain(
    a: Path | LoggedRequest, b: Path | LoggedRequest, *, tokenizer: Tokenizer | None = None
) -> Explanation:
    """Compare request `b` with the earlier request `a`.

    Args:
        a: a request, or a file whose first request is meant; `FILE:LINE` names another.
        b: the same, for the later request.
        tokenizer: counts tokens; by default they are estimated.

    Raises:
        LogError: a file cannot be read or has no such request.
    """
    corpus = Corpus(tokenizer)
    first, second = (corpus.add(_load(item)) for item in (a, b))
    comparer = Comparer(corpus, learn_templates(corpus))
    comparison = comparer.compare(first, second)
    return Explanation(
        num_tokens_a=corpus.num_tokens(first),
        num_tokens_b=corpus.num_tokens(second),
        shared_as_sent=comparison.raw_tokens,
        shared_if_mended=comparison.mended_tokens,
        divergence=comparer.divergence(first, second),
        differences=tuple(item.as_cause() for item in comparison.differences),
        is_exact=corpus.is_exact,
    )


def explanation_as_json(explanation: Explanation) -> dict[str, Any]:
    """The explanation with plain values."""
    causes = [cause_as_json(cause) for cause in explanation.differences]
    return {"schema": SCHEMA, **asdict(explanation), "differences": causes}


def _load(item: Path | LoggedRequest) -> LoggedRequest:
    if isinstance(item, LoggedRequest):
        return item
    path, line = _split(item)
    request = first_of(read_log(path), line)
    if request is None:
        place = "" if line is None else f" at line {line}"
        raise LogError(
            f"{path} has no request{place}; give a file with a request body, or FILE:LINE of a log"
        )
    return request


def _split(path: Path) -> tuple[Path, int | None]:
    """Path and line of `FILE:LINE`."""
    name, colon, line = str(path).rpartition(":")
    if colon and line.isdecimal() and not path.exists():
        return Path(name), int(line)
    return path, None


def first_of(requests: Iterable[LoggedRequest], line: int | None) -> LoggedRequest | None:
    """The first request, or the first of a line."""
    return next((item for item in requests if line is None or item.line == line), None)
