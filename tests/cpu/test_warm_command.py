"""`ramify warm`: fills a cache directory offline; a later engine computes nothing of it."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ramify.cli import app
from ramify.engine.llm import LLM
from ramify.params import SamplingParams
from tests.cpu.test_tier_exactness import SLOW

PROMPTS = [f"The {name} is in the attic, and the key is in the {name}. " * 8 for name in
           ("violin", "lamp", "globe", "atlas")]  # fmt: skip
SIZES: dict[str, Any] = {"max_model_len": 512, "kv_cache_tokens": 1024}
FLAGS = ("--max-model-len", "512", "--kv-cache-tokens", "1024")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["warm", *arguments])


def test_a_directory_that_was_filled_offline_serves_the_first_request(tmp_path: Path) -> None:
    """More prompts than the pool has room for: each is written before it is evicted."""
    texts, chats = tmp_path / "texts.txt", tmp_path / "chats.jsonl"
    texts.write_text("\n".join(PROMPTS[:3]))
    chats.write_text(json.dumps({"prompt": PROMPTS[3], "tenant": "a"}))
    pages = tmp_path / "pages"

    result = run(str(texts), str(chats), "--cache-dir", str(pages), "--cache-disk", "600MB", *FLAGS)

    assert result.exit_code == 0, result.output
    assert "4 prompts" in result.output
    assert "pages written, 0 refused" in result.output
    tier: dict[str, Any] = {"cache_dir": pages, "cache_disk": "600MB", "cache_cost": SLOW}
    params = SamplingParams(max_tokens=1)
    with LLM("ramify-tiny", **SIZES, **tier) as llm:
        outputs = llm.generate(PROMPTS[:3], params) + llm.generate(PROMPTS[3:], params, tenant="a")
    for output in outputs:
        read, length = output.cache.tier_tokens["disk"], len(output.prompt_token_ids)
        assert read == (length - 1) // 16 * 16


@pytest.mark.parametrize(
    "flags", [(), ("--cache-host", "1GB"), ("--cache-dir", "x", "--cache-dir-readonly")]
)
def test_a_warm_up_that_leaves_nothing_is_refused(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Before the model is loaded."""
    file = tmp_path / "texts.txt"
    file.write_text("text")

    result = run(str(file), *flags)

    assert result.exit_code == 2
    assert "nothing would be left of what is computed" in result.output


def test_a_refused_prompt_is_named_and_the_others_are_written(tmp_path: Path) -> None:
    """Exit code 1."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"token_ids": [10**9]}) + "\n" + json.dumps({"prompt": PROMPTS[0]}))

    result = run(str(file), "--cache-dir", str(tmp_path / "pages"), "--cache-disk", "600MB", *FLAGS)

    assert result.exit_code == 1
    assert "refused: " in result.output
    assert "2 prompts" in result.output
