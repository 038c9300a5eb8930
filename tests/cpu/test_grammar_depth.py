"""Grammars of long chains are compiled or refused: a stack overflow would end the process."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("llguidance", reason="llguidance is missing: the extra 'structured'")

PROGRAM = """
import json, sys
from pathlib import Path
from tempfile import TemporaryDirectory
from ramify.engine.logits.grammar import GrammarCompiler
from ramify.engine.text.tokenizer import Tokenizer
from ramify.params import StructuredOutput
from ramify.testing import write_tiny_checkpoint

with TemporaryDirectory() as folder:
    tokenizer = Tokenizer.load(write_tiny_checkpoint(Path(folder), "llama"))
compiler = GrammarCompiler(tokenizer.to_json, vocab_size=300, eos_token_ids=[2])
for fields in json.load(sys.stdin):
    matcher = compiler.compile(StructuredOutput(**fields))
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
    """Chains of references, rules and terminals, nearly as long as a format can be, are compiled."""
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
