"""What the commands on logs say about small logs is what they said when it was recorded.

`scripts/golden_analysis.py` records the cases of `golden/` and compares them; a change that is meant is
recorded again.
"""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest

from ramify.analysis.providers import load_rules
from ramify.analysis.readers import FORMATS
from ramify.analysis.verdicts import CauseName
from tests.pure.analysis.golden_cases import SUFFIX, GoldenCase, Json, measure, record
from tests.pure.analysis.golden_rules import Comparison, differences, names_of

GOLDEN = Path(__file__).parent / "golden"
CASES = [GoldenCase.load(path) for path in sorted(GOLDEN.glob(f"*{SUFFIX}"))]
MAX_BYTES = 400_000


def test_figures_are_as_recorded() -> None:
    """Rows, verdicts, predicted tokens and savings of every case are within the limits of the rules."""
    comparison = Comparison()

    for case in CASES:
        comparison.add(case, measure(case))

    assert not comparison.fallen, "\n".join((*comparison.fallen, *comparison.notes[:20]))


def test_cases_have_every_cause_format_and_rule() -> None:
    """Between them the cases show all causes, read all formats and use all tables of rules; they are small."""
    causes: set[str] = set()
    formats: set[str] = set()
    providers: set[str] = set()
    for case in CASES:
        report = case.figures["lint"]
        causes |= {item["cause"] for verdict in report["verdicts"] for item in verdict["causes"]}
        formats |= report["quality"]["formats"].keys()
        providers |= {report["provider"], *case.providers}

    assert {name for cause in causes for name in names_of(cause)} >= {
        str(name) for name in CauseName
    }
    assert formats == {known.name for known in FORMATS}
    assert providers >= load_rules().providers.keys()
    assert sum(path.stat().st_size for path in GOLDEN.iterdir()) <= MAX_BYTES


def rename_causes(figures: Json) -> None:
    for verdict in figures["lint"]["verdicts"]:
        for cause in verdict["causes"]:
            cause["cause"] = {"clock": "random_id"}.get(cause["cause"], cause["cause"])


def miss_a_row(figures: Json) -> None:
    figures["lint"]["quality"]["num_rows"] -= 1


def forget_a_verdict(figures: Json) -> None:
    next(v for v in figures["lint"]["verdicts"] if v["causes"])["causes"].clear()


def raise_prices(figures: Json) -> None:
    for finding in figures["lint"]["findings"]:
        finding["saving"]["money"] *= 1.05


def predict_a_token_more(figures: Json) -> None:
    figures["lint"]["tables"]["predicted"]["num_read"] += 1


def count_a_token_more(figures: Json) -> None:
    figures["lint"]["verdicts"][-1]["tokens"]["reusable"] += 1


def save_less(figures: Json) -> None:
    figures["lint"]["saving_all"]["tokens"] *= 0.97


def hit_more(figures: Json) -> None:
    figures["simulate"]["default"]["infinite"] += 1e-6


@pytest.mark.parametrize(
    "fault",
    [
        rename_causes,
        miss_a_row,
        forget_a_verdict,
        raise_prices,
        predict_a_token_more,
        count_a_token_more,
        save_less,
        hit_more,
    ],
)
def test_a_fault_falls_below_the_goals(fault: Callable[[Json], None]) -> None:
    """A wrong cause, a lost row, a price, a token or a hit rate that moved: each is reported."""
    case = next(case for case in CASES if case.name == "report-clock")
    current = copy.deepcopy(case.figures)
    same, different = Comparison(), Comparison()

    same.add(case, current)
    fault(current)
    different.add(case, current)

    assert not same.fallen
    assert different.fallen
    assert list(differences(case.figures, current))


def test_a_case_is_the_same_when_it_is_recorded_again(tmp_path: Path) -> None:
    """Files of a case are read back as they were, and equal cases are equal files."""
    log = {"log.txt": b"Hello world, how are you?\n" * 3, "more.txt": b"\xff\xfeH\x00i\x00"}

    case = record("greetings", log, ["vllm"])

    path = case.save(tmp_path)
    first = path.read_bytes()
    assert GoldenCase.load(path) == case
    assert record("greetings", log, ["vllm"]).save(tmp_path).read_bytes() == first
