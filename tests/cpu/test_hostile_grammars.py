"""Hostile grammars are compiled or refused: they neither end the process nor hold it up."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ramify.engine.logits.grammar import GrammarCompiler
from ramify.engine.text.tokenizer import Tokenizer
from ramify.errors import InvalidParamsError
from ramify.params import StructuredOutput
from ramify.testing import write_tiny_checkpoint

pytest.importorskip("llguidance", reason="llguidance is missing: the extra 'structured'")

PROGRAM = """
import json, sys
from pathlib import Path
from tempfile import TemporaryDirectory
from ramify.engine.logits.grammar import GrammarCompiler
from ramify.errors import InvalidParamsError
from ramify.engine.text.tokenizer import Tokenizer
from ramify.params import StructuredOutput
from ramify.testing import write_tiny_checkpoint

with TemporaryDirectory() as folder:
    tokenizer = Tokenizer.load(write_tiny_checkpoint(Path(folder), "llama"))
compiler = GrammarCompiler(tokenizer.to_json, vocab_size=300, eos_token_ids=[2])
for fields in json.load(sys.stdin):
    try:
        matcher = compiler.compile(StructuredOutput(**fields))
    except InvalidParamsError as error:
        assert "to compile" in str(error), error  # of a busy machine
        continue
    assert matcher.token_bitmasks([], ())[0].any()
"""


def _references(num_levels: int) -> str:
    items = {
        f"{level:x}": {"items": {"$ref": f"#/$defs/{level + 1:x}"}} for level in range(num_levels)
    }
    schema = {"$ref": "#/$defs/0", "$defs": items | {f"{num_levels:x}": {}}}
    return json.dumps(schema, separators=(",", ":"))


def _rules(name: str, num_levels: int) -> str:
    chain = "".join(f"{name}{level}: {name}{level + 1}\n" for level in range(num_levels))
    return f'start: {name}0\n{chain}{name}{num_levels}: "a"\n'


def test_long_chains_do_not_end_the_process() -> None:
    """Chains nearly as long as a format can be are compiled, or refused for the time that they take."""
    formats = [
        {"json_schema": _references(1400)},
        {"grammar": _rules("r", 15_000)},
        {"grammar": _rules("T", 15_000)},
    ]

    process = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(formats),
        capture_output=True,
        text=True,
        check=False,
    )

    assert process.returncode == 0, process.stderr[-1000:]


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "a"' + "\n" * 250_000 + "b",
        "start" + "\n" * 250_000 + "b",
        "\r" * 125_000 + "start" + " " * 125_000,
        "root ::= a0\n" + "".join(f"a{i} ::= a{i + 1}\n" for i in range(10_000)) + 'a10000 ::= "b"',
    ],
    ids=["blank lines", "blank lines after start", "blanks", "chain"],
)
def test_the_language_of_a_grammar_is_found_in_linear_time(grammar: str, tmp_path: Path) -> None:
    """Blank lines and long chains in GBNF hold the interpreter lock for no more than a moment."""
    tokenizer = Tokenizer.load(write_tiny_checkpoint(tmp_path, "llama"))
    compiler = GrammarCompiler(tokenizer.to_json, vocab_size=300, eos_token_ids=[2])
    began = time.process_time()

    with pytest.raises(InvalidParamsError):
        compiler.compile(StructuredOutput(grammar=grammar))

    assert time.process_time() - began < 5


def test_lark_and_gbnf_are_told_apart(tmp_path: Path) -> None:
    """Lark has a rule `start`, on whatever line; GBNF has `root`."""
    tokenizer = Tokenizer.load(write_tiny_checkpoint(tmp_path, "llama"))
    compiler = GrammarCompiler(tokenizer.to_json, vocab_size=300, eos_token_ids=[2])

    for grammar in (
        '\n\n start : "a"',
        '%llguidance {}\nstart: "a"',
        'A: "a"\nstart: A',
        'root ::= "a"',
    ):
        matcher = compiler.compile(StructuredOutput(grammar=grammar))
        assert matcher.advance(tokenizer.encode("a", add_special_tokens=False))
