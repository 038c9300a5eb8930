"""`llm`, the command-line client, with this server as an extra OpenAI model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from report import KEY, MODEL, SCRATCH, SCRIPTED_URL, URL, case

folder = Path(SCRATCH) / "llm"
folder.mkdir(parents=True, exist_ok=True)
os.environ["LLM_USER_PATH"] = str(folder)
(folder / "extra-openai-models.yaml").write_text(
    f"- model_id: here\n  model_name: {MODEL}\n  api_base: {URL}/v1\n  api_key_name: here\n"
    f"- model_id: scripted\n  model_name: {MODEL}\n  api_base: {SCRIPTED_URL}/v1\n"
    "  api_key_name: here\n  supports_tools: true\n  supports_schema: true\n"
)


def llm(*arguments: str) -> str:
    """Run `llm` with these arguments; returns its standard output."""
    command = [sys.executable, "-m", "llm", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr[-300:]
    return result.stdout


llm("keys", "set", "here", "--value", KEY)


@case("prompt, streamed and not")
def _() -> str:
    llm("-m", "here", "-o", "max_tokens", "8", "Who?")
    return llm("-m", "scripted", "--no-stream", "Who?").strip()


@case("schema")
def _() -> str:
    return llm("-m", "scripted", "--schema", "name, age int", "Who?").strip()


@case("tool")
def _() -> str:
    code = "def weather(city: str) -> str:\n    'The weather of a city.'\n    return '22 degrees'"
    text = llm("-m", "scripted", "--functions", code, "Weather in Rome?").strip()
    assert "22 degrees" in text
    return text
