"""`ramify verify` reports no difference for exact backends, and each one of inexact backends."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ramify import LLM
from ramify.cli import app
from ramify.engine.exactness_check import ExactnessCheck, random_prompts, read_prompt_lines
from ramify.errors import ConfigError
from ramify.testing import write_tiny_checkpoint
from tests.cpu.attention_mutants import CutAtNodeBoundary
from tests.cpu.engine_cases import CPU


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("verify"), "llama")


def prompts_for(llm: LLM, num: int = 4) -> list[tuple[int, ...]]:
    return random_prompts(num, llm.engine.model_config.vocab_size, llm.config.max_model_len)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_every_way_of_computing_gives_the_same_bits(checkpoint: Path, kv_dtype: str) -> None:
    """All scenarios give equal bits for each K/V dtype, and each exercises its own feature."""
    llm = LLM(checkpoint, kv_dtype=kv_dtype, kv_cache_tokens=2048)

    ways = {way.name: way for way in ExactnessCheck(llm, prompts_for(llm), 4).scenarios()}

    assert all(way.differences == [] for way in ways.values())
    assert all(way.num_logits and way.num_kv for way in ways.values())
    assert ways["warm"].read_tokens and ways["batched"].read_tokens
    assert ways["preempted and resumed"].preemptions
    assert llm.cache.stats().lookups == 0


def test_a_backend_that_depends_on_the_cache_is_found(checkpoint: Path) -> None:
    """The check names the layer and plane that differ; layer 0's K/V does not use attention."""
    llm = LLM(checkpoint, kv_cache_tokens=2048)
    llm.engine.runner.backend = CutAtNodeBoundary(llm.engine.attention_spec, CPU)

    differences = [
        difference
        for way in ExactnessCheck(llm, prompts_for(llm), 4).scenarios()
        for difference in way.differences
    ]

    assert differences
    assert all(difference.layer is None or difference.layer > 0 for difference in differences)
    assert any(
        f"layer {difference.layer}, plane {difference.plane}" in str(difference)
        for difference in differences
    )


def test_the_command_tells_and_its_exit_code_says(checkpoint: Path, tmp_path: Path) -> None:
    """The exit code is 0 if nothing differs, 1 if something does, 2 for an empty prompt file."""
    run = CliRunner().invoke
    result = run(app, ["verify", str(checkpoint), "--sample", "2", "--json"])
    assert result.exit_code == 0
    assert {way["name"] for way in json.loads(result.stdout)} >= {"warm", "chunked", "batched"}

    inexact = ["--no-exact", "--attention-backend", "sdpa", "--sample", "4"]
    result = run(app, ["verify", str(checkpoint), *inexact])
    assert result.exit_code == 1
    assert "first difference: " in result.stdout

    empty = tmp_path / "none.txt"
    empty.write_text("\n\n")
    assert run(app, ["verify", str(checkpoint), "--prompts", str(empty)]).exit_code == 2


def test_prompts_of_a_file_are_its_lines(checkpoint: Path, tmp_path: Path) -> None:
    llm = LLM(checkpoint, kv_cache_tokens=2048)
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\ntwo and more\n")

    assert [len(prompt) > 0 for prompt in read_prompt_lines(llm, path)] == [True, True]
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompt_lines(llm, tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="the limit is"):
        ExactnessCheck(llm, [tuple([1] * llm.config.max_model_len)])
