"""Savings that `lint` predicts, beside what a replay of the log mended by its generator reads more.

`python -m tests.pure.analysis.mended_logs --seed 41 --format openai_chat` prints a table.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Collection
from pathlib import Path

from ramify.analysis.corpus import Corpus
from ramify.analysis.linting import Linted, lint_parts
from ramify.analysis.log_files import read_log
from ramify.analysis.providers.replay import CacheModel, prompts_of
from ramify.analysis.providers.rules import load_rules
from ramify.analysis.savings.fixing import Fix
from ramify.analysis.verdicts import Saving
from tests.pure.analysis.planted_formats import FORMATS, planted_log, write_log
from tests.pure.analysis.planted_logs import KINDS, LEGITIMATE, UNSEEN, Mended, PlantedLog

MIXED = "mixed"  # a log with all causes, up to three in a request


def corpus_of_file(path: Path) -> Corpus:
    """The requests of a log."""
    corpus = Corpus()
    for request in read_log(path):
        corpus.add(request)
    return corpus


def num_read(corpus: Corpus, provider: str | None) -> int:
    """Tokens that all requests read by the rule of a provider, by default the log's."""
    rules = load_rules()
    model = CacheModel(corpus, provider, rules) if provider else CacheModel.of_log(corpus, rules)
    return sum(item.billed.num_read for item in model.replay(prompts_of(corpus)))


class LintedLog:
    """A planted log in a format, as sent and linted."""

    def __init__(
        self, log: PlantedLog, format_name: str, folder: Path, provider: str | None = None
    ) -> None:
        self._log, self._format, self._folder = log, format_name, folder
        self._provider = provider
        self.corpus = self._read("sent", {})
        self._num_read = num_read(self.corpus, provider)
        self.linted: Linted = lint_parts(self.corpus, provider=provider)

    def _read(self, name: str, mended: Mended, *, as_shown: bool = False) -> Corpus:
        path = self._folder / f"{self._format}_{name}.log"
        write_log(self._log, self._format, path, mended=mended, as_shown=as_shown, with_noise=False)
        return corpus_of_file(path)

    def named(self, causes: Collection[str]) -> dict[str, set[int]]:
        """The cells in which `lint` names a cause; of several, any: names do not matter together."""
        cells: set[int] = set()
        verdicts = self.linted.report.verdicts
        for request, verdict in zip(self._log.requests, verdicts, strict=True):
            if any(item.cause in causes for item in verdict.causes):
                cells.add(request.cell)
        return dict.fromkeys(causes, cells)

    def true_saving(self, mended: Mended, *, as_shown: bool = False) -> int:
        """Tokens that the log reads more with these causes undone by the generator."""
        corpus = self._read("mended", mended, as_shown=as_shown)
        return num_read(corpus, self._provider) - self._num_read

    def predicted_saving(self, causes: Collection[str]) -> Saving:
        """What all findings of these causes save if they are mended together."""
        fixes = [
            Fix(finding.cause, finding.segment)
            for finding in self.linted.report.findings
            if finding.cause in causes
        ]
        return self.linted.replay.saving(fixes)


def linted_log(
    seed: int, format_name: str, cause: str, folder: Path, num_requests: int
) -> LintedLog:
    """A planted log with one cause, or `MIXED`."""
    alone = None if cause == MIXED else cause
    log = planted_log(seed, format_name, num_requests=num_requests, alone=alone)
    # Salts are vLLM's.
    return LintedLog(log, format_name, folder, "vllm" if cause == "namespace_split" else None)


def error(predicted: Saving, true: int) -> float:
    """Of a prediction, as a share of the true saving."""
    return (predicted.tokens - true) / max(1, true)


def causes_of(format_name: str) -> list[str]:
    """Causes of waste that the text of a format can prove."""
    unseen = UNSEEN[FORMATS[format_name].api] | LEGITIMATE
    return [name for name in KINDS if name not in unseen]


def main() -> None:
    """Print a table; `named` is the true saving in cells in which the cause is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, nargs="+", default=[41])
    parser.add_argument("--format", nargs="+", default=["openai_chat"], choices=list(FORMATS))
    parser.add_argument("--cause", nargs="+", default=[*KINDS, MIXED])
    parser.add_argument("--num-requests", type=int, default=300)
    options = parser.parse_args()
    print("format            seed cause                     true     named   error range")  # noqa: T201
    for format_name in options.format:
        for seed in options.seed:
            for cause in options.cause:
                if cause == MIXED or cause in causes_of(format_name):
                    print(_row(seed, format_name, cause, options.num_requests), flush=True)  # noqa: T201


def _row(seed: int, format_name: str, cause: str, num_requests: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        log = linted_log(seed, format_name, cause, Path(folder), num_requests)
        causes = causes_of(format_name) if cause == MIXED else [cause]
        everywhere = dict.fromkeys(causes, range(10**6))
        true = log.true_saving(everywhere)
        shown = log.true_saving(log.named(causes), as_shown=True)
        own = log.predicted_saving(causes)
        others = {finding.cause.value for finding in log.linted.report.findings} - set(causes)
        marks = f"{'' if own.low <= true <= own.high else '*'} {sorted(others) or ''}"
        return (
            f"{format_name:17}{seed:5} {cause:20}{true:10}{shown:10}{error(own, shown):8.2%}"
            f" {own.low}..{own.high}{marks}"
        )


if __name__ == "__main__":
    main()
