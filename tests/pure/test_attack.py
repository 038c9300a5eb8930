"""The figures of `make attack`: percentiles, AUC, and which goals count as missed."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from attack import load_row, percentile, table
from attacks.checks import auc
from attacks.load import LOAD_ATTACKS, LoadResult

GOOD = LoadResult("x", (0.1, 0.2, 0.3), (0.01,), Counter({"200": 3}), Counter({"400": 9}), 10, 10.0)


@pytest.mark.parametrize("seed", range(20))
def test_auc_is_the_share_of_pairs_in_order(seed: int) -> None:
    """Beside all pairs, one by one; equal values count half."""
    rng = random.Random(seed)
    known = [float(rng.randrange(9)) for _ in range(rng.randrange(1, 30))]
    new = [float(rng.randrange(9)) for _ in range(rng.randrange(1, 30))]
    pairs = [(a < b) + (a == b) / 2 for a in known for b in new]

    assert auc(known, new) == pytest.approx(sum(pairs) / len(pairs))


def test_percentiles_are_values_that_were_measured() -> None:
    """The nearest rank, without interpolation."""
    values = [float(value) for value in range(1, 201)]

    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [100.0, 198.0, 200.0]
    assert percentile([3.0], 0.99) == 3.0


@pytest.mark.parametrize(
    ("change", "num_missed"),
    [
        ({}, 0),
        ({"latencies_s": (0.1, 2.1)}, 1),
        ({"livez_s": (0.2,)}, 1),
        ({"statuses": Counter({"200": 5, "500": 1})}, 1),
        ({"attacker_statuses": Counter({"500": 1})}, 1),
        ({"rss_growth": 1 << 30}, 1),
        ({"history_bytes": 1e9, "livez_s": (9.0,)}, 2),
        ({"history_bytes": float("nan")}, 1),  # there is no such metric
    ],
)
def test_a_goal_that_is_missed_is_named(change: dict[str, object], num_missed: int) -> None:
    """Each by itself, and it is in the table."""
    row = load_row(replace(GOOD, **change))  # type: ignore[arg-type]

    assert len(row.missed) == num_missed
    assert all(text in table([row]) for text in row.missed)


def test_attacks_have_names_of_their_own() -> None:
    """`--only` and the attackers' process find them by name."""
    names = [attack.name for attack in LOAD_ATTACKS]

    assert len(set(names)) == len(names)
    assert all(attack.num_attackers for attack in LOAD_ATTACKS if attack.send is not None)
