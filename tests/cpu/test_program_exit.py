"""A program may end while threads of the engine are at work."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("llguidance", reason="formats need the extra ramify[structured]")

PROGRAM = """
import atexit
import json
import threading
atexit.register(lambda: print([one.name for one in threading.enumerate()]))  # called last
from pathlib import Path
import ramify
from ramify.engine.logits import grammar
from ramify.engine.text.tokenizer import Tokenizer
from ramify.errors import InvalidParamsError
from ramify.params import StructuredOutput

tokenizer = Tokenizer.load(Path(ramify.__file__).parent / "data" / "ramify-tiny")
formats = grammar.GrammarCompiler(tokenizer.to_json, vocab_size=tokenizer.vocab_size, eos_token_ids=[2])
formats.compile(StructuredOutput(choice=("yes", "no")))
grammar.COMPILE_S = 0.0  # the caller waits for nothing, the compiler needs tens of ms
names = {f"p{n}": {"type": "string", "pattern": f"^[a-z]{{1,{500 + n}}}.{{3,900}}$"} for n in range(500)}
schema = json.dumps({"type": "object", "properties": names, "required": ["p1", "p2", "p3"]})
try:
    formats.compile(StructuredOutput(json_schema=schema))
except InvalidParamsError as error:
    print("refused", "to compile" in str(error))
"""


def test_a_program_ends_while_a_format_is_compiled() -> None:
    """The compiler's thread came back into an interpreter that was gone: a segmentation fault."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout == "refused True\n['MainThread']\n"
