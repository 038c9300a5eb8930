"""System prompts of several blocks, of several applications in one log."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pure.analysis.contract_log import MORE, RULES, WORDS, Json, causes, verdicts


def _body(number: int, *blocks: str) -> Json:
    return {
        "model": "claude-sonnet-4-5",
        "max_tokens": 9,
        "system": [{"type": "text", "text": block} for block in blocks],
        "messages": [{"role": "user", "content": f"Question {number} about {WORDS[number]}?"}],
    }


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        (("Session 97b73ceb3ffd", "Session 21638b529b4a", "Session ea7b5eb561a4"), "random_id"),
        (("cwd: /tmp/31163bfd1d", "cwd: /tmp/b797fee294", "cwd: /tmp/8a7d786330"), "path_or_state"),
        (("2026-03-04T10:00:07Z", "2026-03-04T10:01:19Z", "2026-03-04T10:09:44Z"), "clock"),
        (("User: Anna", "User: Boris", "User: Carla"), "new_content"),
        (("Customer 4711", "Customer 4712", "Customer 9912"), "new_content"),
    ],
)
def test_a_short_block_with_a_value_is_judged(
    tmp_path: Path, values: tuple[str, ...], cause: str
) -> None:
    """A block that is little more than a value names the cause; who is served is content."""
    made = verdicts(tmp_path, *(_body(n, value, RULES) for n, value in enumerate(values)))

    assert [causes(verdict)[0] for verdict in made[1:]] == [cause, cause]
    assert {verdict["divergence"]["segment"] for verdict in made[1:]} == {"system[0]"}


def test_the_values_of_one_application_do_not_convict_another(tmp_path: Path) -> None:
    """Two applications share a status block; only the one whose branch changes has a cause."""
    other = RULES.replace("Rule", "Law")

    def status(who: str, branch: str) -> str:
        return (
            f"<env>\nWorking directory: /home/{who}/src\nPlatform: linux\nBranch: {branch}\n</env>"
        )

    bodies = [
        _body(n, status("boris", "main"), other, MORE)
        if n % 2
        else _body(n, status("anna", f"feature-{n}"), RULES, MORE)
        for n in range(8)
    ]

    made = verdicts(tmp_path, *bodies)

    for number in range(2, 8):
        verdict = made[number]
        named = [item["cause"] for item in verdict["causes"] if item["certainty"] != "suspected"]
        assert verdict["best_match_line"] == number - 1
        assert named == [["path_or_state"], ["new_content"]][number % 2]


def test_a_block_that_one_application_has_is_matched_within_it(tmp_path: Path) -> None:
    """A session's block stands first in one application; the other begins with the same rules."""
    ids = ("97b73ceb3ffd", "21638b529b4a", "ea7b5eb561a4", "795b9a9a80fd")
    bodies = []
    for number, name in enumerate(ids):
        bodies.append(_body(2 * number, f"Session {name}", RULES, f"Policy: {MORE}"))
        bodies.append(_body(2 * number + 1, RULES, f"Other policy: {MORE}"))

    made = verdicts(tmp_path, *bodies)

    assert [causes(verdict)[0] for verdict in made[2:]] == ["random_id", "new_content"] * 3
