"""Patterns of module names: the matches of `re`, in bounded time and memory."""

from __future__ import annotations

import contextlib
import time

import pytest

from ramify.errors import CheckpointError
from ramify.models.configs.quantization.module_pattern import compile_pattern


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
    assert compile_pattern(text, "file").matches_start(name) == matches


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
        "(((a{1,100}){1,100}){1,100}){1,100}b",
        "((((a{9999}){9999}){9999}){9999})",
        "a(?R)?b|(?R)",
        "(" * 256 + ")" * 256,
    ],
)
def test_no_pattern_takes_long(text: str) -> None:
    """It matches, or is refused; `re` needs more than the age of the universe for some of these."""
    start = time.process_time()

    with contextlib.suppress(CheckpointError):
        compile_pattern(text, "file").matches_start("a" * 100)

    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("(", "missing"),
        (")", "unbalanced"),
        ("*a", "nothing to repeat"),
        ("[a", "unterminated"),
        ("[z-a]", "bad character range"),
        ("a" * 1000, "1000 characters, above 512"),
        ("a{10}b{ 101}", "1010 copies, above 1000"),
        ("(" * 10 + "a" + ")+" * 10, "1024 copies, above 1000"),
        ("(?x)" + "(" * 10 + "a" + ") #\n +" * 10, "1024 copies, above 1000"),
        ("(" * 10 + "a" + "){1,}" * 10, "1024 copies, above 1000"),
        ("(" * 10 + "a" + "){1,2}" * 10, "1024 copies, above 1000"),
        ("a\\", "bad escape"),
    ],
)
def test_what_is_refused(text: str, reason: str) -> None:
    """With the file, the pattern and the reason."""
    with pytest.raises(
        CheckpointError, match=f"^config.json: dynamic holds .*{reason}.*name the modules"
    ):
        compile_pattern(text, "config.json: dynamic")


def test_any_number_of_repeats_that_cannot_be_nested_is_read() -> None:
    """Of characters and classes: they copy no others."""
    text = r"\d+[ab]+\w{1,2}.+" * 20

    assert not compile_pattern(text, "file").matches_start("model")


def test_a_match_that_takes_too_long_is_refused() -> None:
    """With the pattern and the name."""
    pattern = compile_pattern("(((a{1,100}){1,100}){1,100}){1,100}b", "config.json: dynamic")

    with pytest.raises(CheckpointError, match=r"takes more than 0\.1 s to compare with aaa"):
        pattern.matches_start("a" * 100)
