"""Patterns of module names: the matches of `re`, in bounded time."""

from __future__ import annotations

import random
import re
import time
import warnings

import pytest

from ramify.models.configs.quantization.module_pattern import PatternError, compile_pattern

ATOMS = ("a", "b", ".", r"\.", r"\d", r"\w", r"\S", r"\D", "[ab]", "[^a]", "[a-c.]", "[]a]", "[a-]")
REPEATS = ("", "", "", "", "*", "+", "?", "{2}", "{1,2}", "{,2}", "{1,}", "*?", "+?")
GROUPS = ("(", "(?:", "(?P<x>", "(?=", "(?!")


def random_pattern(rng: random.Random, depth: int = 0) -> str:
    """A pattern of up to three levels of groups; may be none."""
    text = ""
    for _ in range(rng.randint(1, 4)):
        kind = rng.randrange(10)
        if kind < 6 or depth == 3:
            text += rng.choice(ATOMS) + rng.choice(REPEATS)
        elif kind < 7:
            text += rng.choice("^$")
        else:
            inner = random_pattern(rng, depth + 1)
            text += f"{rng.choice(GROUPS)}{inner}){rng.choice(REPEATS)}"
    return f"{text}|{random_pattern(rng, depth + 1)}" if depth < 3 and rng.random() < 0.3 else text


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_matches_are_those_of_re() -> None:
    """Of random patterns on random names, both of few characters so that many match."""
    rng, num_matches, num_patterns = random.Random(0), 0, 0
    for _ in range(3000):
        text = random_pattern(rng)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                expected = re.compile(text)
                pattern = compile_pattern(text)
            except (re.error, PatternError):
                continue
        num_patterns += 1
        for _ in range(6):
            name = "".join(rng.choices("ab.1c", k=rng.randrange(9)))
            matches = pattern.matches_start(name)
            assert matches == (expected.match(name) is not None), (text, name)
            num_matches += matches

    assert num_patterns > 1000
    assert num_matches > 1000


@pytest.mark.parametrize(
    ("text", "name", "matches"),
    [
        (r".*\.(q|k|v)_proj$", "model.layers.0.self_attn.q_proj", True),
        (r".*\.(q|k|v)_proj$", "model.layers.0.self_attn.q_proj_2", False),
        (r"^(?!.*lm_head).*", "model.layers.0.mlp.up_proj", True),
        (r"^(?!.*lm_head).*", "lm_head", False),
        (r".*layers\.(1[0-9]|2\d)\..*", "model.layers.17.mlp", True),
        (r"model\.layers\.\d+\.mlp\.(gate|up)_proj", "model.layers.123.mlp.up_proj", True),
        (r"layers", "model.layers", False),
    ],
)
def test_patterns_of_real_files(text: str, name: str, matches: bool) -> None:
    """From the start of the name, not to its end."""
    assert compile_pattern(text).matches_start(name) == matches


@pytest.mark.parametrize(
    "text",
    [
        "(a+)+$",
        "(a|a)*b",
        "(.*a){20}c",
        ".*.*.*.*.*.*.*.*.*x",
        "((a{64}){64})b",
        "(a*)*" * 60 + "x",
        "(?=.*.*.*.*.*.*x)" * 20,
    ],
)
def test_no_pattern_takes_long(text: str) -> None:
    """`re` needs more than the age of the universe for some of these."""
    start = time.process_time()

    compile_pattern(text).matches_start("a" * 100)

    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("(", "ends too early|not closed"),
        (")", "unbalanced"),
        ("*a", "nothing to repeat"),
        ("a**", "repeat of a repeat"),
        ("a{3,2}", "ends below its start"),
        ("a{100000}", "counts above 256"),
        ("[a", "ends too early"),
        ("[z-a]", "no range"),
        (r"[\.-z]", "behind an escape"),
        (r"(a)\1", "refused"),
        (r"\bx", "refused"),
        ("(?<=a)b", "refused"),
        ("(?i)a", "refused"),
        ("(((a*)*)*)", "nested more than 2 deep"),
        ("(?=.*(?=.*a))", "nested more than 2 deep"),
        ("(" * 20 + "a" + ")" * 20, "groups are nested more than 16 deep"),
        ("a" * 1000, "1000 characters, above 512"),
        ("a\\", "ends too early"),
    ],
)
def test_what_is_refused(text: str, reason: str) -> None:
    """With the reason."""
    with pytest.raises(PatternError, match=reason):
        compile_pattern(text)
