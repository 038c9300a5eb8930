"""How well `lint` finds causes that a generator has planted, in seeds that no rule was tuned on."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.pure.analysis.planted_formats import FORMATS
from tests.pure.analysis.scoring import Score, score_format, total

GOAL = 0.97
FEW = 40  # true cases below which a few misses decide


def scored(folder: Path, seeds: Sequence[int], formats: Sequence[str]) -> Score:
    whole = Score()
    for format_name in formats:
        for seed in seeds:
            whole.add(score_format(seed, format_name, folder))
    return whole


def check(score: Score, least: float) -> None:
    for counts in (score.proved, score.likely):
        everything = total(list(counts.values()))
        assert everything.precision >= least, score.notes[:20]
        assert everything.recall >= least, score.notes[:20]
    weak = {
        cause: (counts.precision, counts.recall)
        for cause, counts in score.proved.items()
        if counts.right + counts.missed >= FEW and min(counts.precision, counts.recall) < 0.8
    }
    assert not weak or least < GOAL
    assert score.divergences.recall >= 0.99
    assert score.matches.recall >= 0.99


def test_planted_causes_are_found(tmp_path: Path) -> None:
    """Few logs, so that a cause in one of them weighs: 0.95 of all; divergences to the character."""
    check(scored(tmp_path, [21], ["openai_chat", "anthropic", "otlp"]), 0.95)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_planted_causes_are_found_in_every_format(tmp_path: Path) -> None:
    """Eleven formats and three seeds, about 10,000 requests: 0.97, no cause below 0.8."""
    check(scored(tmp_path, [21, 22, 23], list(FORMATS)), GOAL)
