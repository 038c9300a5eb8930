"""Results of one client's cases, a line of JSON each; imported by the files of `cases/`."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from typing import Any

# The built-in model; its text means little, so its cases look at forms, counts and errors.
URL = os.environ.get("RAMIFY_URL", "")
# A server whose answers are scripted: it calls tools, follows schemas and repeats results.
SCRIPTED_URL = os.environ.get("RAMIFY_SCRIPTED_URL", "")
MODEL = "ramify-tiny"
TOKENIZER = os.environ.get("RAMIFY_TOKENIZER", "")  # a directory with `tokenizer.json`
SCRATCH = os.environ.get("RAMIFY_SCRATCH", "")
KEY = "none"


def case(name: str) -> Callable[[Callable[[], Any]], None]:
    """Run the decorated function as a case now; it fails if it raises."""

    def run(function: Callable[[], Any]) -> None:
        try:
            note, status = function(), "ok"
        except BaseException as error:
            lines = [line for line in str(error).splitlines() if line.strip()] or [""]
            note, status = f"{type(error).__name__}: {lines[0][:300]}", "FAILED"
            traceback.print_exc()
        result = {"case": name, "status": status, "note": str(note or "")[:300]}
        print("RESULT " + json.dumps(result), flush=True)

    return run
