"""The `ramify` commands, each run in its own process as a user would."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ramify.cli.demo import COLD, OFF, WARM, DemoResult, Quiz, Round, _print_demo
from ramify.outputs import CacheReport, Completion, FinishReason, RequestMetrics, RequestOutput
from ramify.testing import write_tiny_checkpoint
from tests.forked_command import run_command


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("cli") / "llama", "llama")


@pytest.fixture(scope="module")
def quiz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quiz") / "quiz.json"
    document = "Mara has 14 lamps. The violin is in the attic. " * 20
    questions = [{"question": f"What is number {n}?", "answer": "no idea"} for n in range(5)]
    path.write_text(json.dumps({"document": document, "questions": questions}))
    return path


def ramify(*args: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return run_command(*args, stdin=stdin, COLUMNS="200")


def test_help_is_quick_and_lists_the_commands() -> None:
    """`--help` loads no torch and names every command."""
    start = time.perf_counter()

    process = ramify("--help")

    assert process.returncode == 0
    assert all(name in process.stdout for name in ("demo", "generate", "info"))
    loaded = subprocess.run(
        [sys.executable, "-c", "import sys, ramify.cli; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert loaded.stdout.strip() == "False"
    assert time.perf_counter() - start < 60  # not a speed test: it must not hang


def test_demo_gives_the_same_answers_and_counts_every_token(checkpoint: Path, quiz: Path) -> None:
    """Cache off computes all tokens, cold the document once, warm at most a page per question.

    The answers of all three rounds are equal, and each round accounts for every token.
    """
    process = ramify("demo", "--model", checkpoint, "--document", quiz, "--json")

    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    off, cold, warm = report["rounds"]
    total = off["computed_tokens"]
    assert report["same_answers"] is True
    for counts in (off, cold, warm):
        assert counts["computed_tokens"] + counts["read_tokens"] + counts["shared_tokens"] == total
    assert cold["computed_tokens"] < total / 3
    assert cold["read_tokens"] + cold["shared_tokens"] > 0
    assert warm["computed_tokens"] <= 5 * 16
    assert len(report["questions"]) == 5
    assert {"question", "expected", "cache off", "cold", "warm", "right"} <= set(
        report["questions"][0]
    )


def test_the_built_in_demo_answers_every_question() -> None:
    """All 32 answers about the built-in document are right and equal those with the cache off."""
    process = ramify("demo", "--json")

    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    off, cold, warm = report["rounds"]
    assert (report["right"], report["known"], report["same_answers"]) == (32, 32, True)
    assert cold["computed_tokens"] < off["computed_tokens"] / 16
    assert warm["computed_tokens"] <= 32 * 16


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"document": "d", "questions": []}, ["0 questions"]),
        ({"questions": [{"question": "q"}]}, ["document"]),
        ({"document": "d", "questions": [{"question": "word " * 3000}]}, ["max_model_len"]),
    ],
)
def test_a_quiz_that_cannot_be_asked_is_an_error(
    checkpoint: Path, tmp_path: Path, content: dict[str, object], words: list[str]
) -> None:
    """An unusable quiz ends the command with code 2 and an error that says why."""
    path = tmp_path / "quiz.json"
    path.write_text(json.dumps(content))

    process = ramify("demo", "--model", checkpoint, "--document", path)

    assert process.returncode == 2, process.stdout
    assert "Traceback" not in process.stderr
    assert all(word in process.stderr for word in words), process.stderr


def test_demo_asks_about_any_text_and_prints_tables(checkpoint: Path, tmp_path: Path) -> None:
    """A plain text file works as a document: the demo makes questions from its words."""
    document = tmp_path / "text.txt"
    document.write_text("Seven sailors crossed the northern strait under a yellow moon. " * 5)

    process = ramify("demo", "--model", checkpoint, "--document", document, "--num-questions", "3")

    assert process.returncode == 0, process.stderr
    assert "cache off" in process.stdout and "warm" in process.stdout
    assert "the same tokens for all 3 questions" in process.stdout


@pytest.mark.parametrize(
    ("answers", "heading"),
    [((None, None), False), (("blue", "red"), False), (("blue", "green"), True)],
)
def test_right_answers_are_shown_where_one_is_wrong(
    answers: tuple[str | None, ...], heading: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A column that would be empty is left out: of a text of one's own, and where all answers are right."""
    outputs = [output_of("blue"), output_of("red")]
    rounds = [Round(name, tuple(outputs), 1.0) for name in (OFF, COLD, WARM)]

    _print_demo(DemoResult(Quiz("d", ("Sky?", "Rose?"), answers), tuple(rounds)))

    shown = capsys.readouterr().out
    assert ("right answer" in shown) == heading
    assert ("green" in shown) == heading
    assert ("Right answers: 2 of 2." in shown) == (answers == ("blue", "red"))
    assert ("Right answers: 1 of 2." in shown) == heading


def output_of(text: str) -> RequestOutput:
    """The output of a request that was answered with a text."""
    completion = Completion(text, (1,), FinishReason.STOP)
    return RequestOutput(
        0, None, (1,), (completion,), RequestMetrics(0, 1, 1, 1), CacheReport(0, 0, 1)
    )


def test_generate_prints_text_and_where_the_prompt_came_from(checkpoint: Path) -> None:
    """`generate` reports on stderr how many prompt tokens were read, shared and computed."""
    process = ramify("generate", checkpoint, "--prompt", "hello", "--max-tokens", "4")

    assert process.returncode == 0, process.stderr
    assert "prompt 5 tokens: 0 read, 0 shared, 5 computed; output 4 tokens" in process.stderr


def test_generate_reads_files_and_stdin_and_answers_in_json(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Prompts from an option, a file and stdin all get an output; --progress shows a bar."""
    file = tmp_path / "prompt.txt"
    file.write_text("from a file")

    process = ramify(
        *("generate", checkpoint, "--prompt", "one", "--prompt-file", file, "--prompt-file", "-"),
        *("--max-tokens", "2", "--logprobs", "1", "--progress", "--json"),
        stdin="from stdin",
    )

    outputs = json.loads(process.stdout)
    assert [len(output["token_ids"]) for output in outputs] == [2, 2, 2]
    assert all(len(output["logprobs"]) == 2 for output in outputs)
    assert outputs[0]["cache"]["computed_tokens"] == outputs[0]["prompt_tokens"]
    assert "3/3" in process.stderr


def test_generate_speaks_through_the_chat_template(checkpoint: Path) -> None:
    """--system and --prompt become two messages that the chat template renders."""
    process = ramify(
        *("generate", checkpoint, "--system", "be brief", "--prompt", "hi"),
        *("--max-tokens", "2", "--json"),
    )

    outputs = json.loads(process.stdout)
    assert outputs[0]["prompt_tokens"] == 1 + len("be brief") + len("hi") + 5 - _merged(
        "be brief", "hi"
    )


def _merged(*texts: str) -> int:
    """Tokens that the tiny tokenizer's merges save."""
    from ramify.testing import TINY_MERGES

    return sum(text.count(pair) for text in texts for pair in TINY_MERGES)


def test_info_tells_ops_backend_exactness_and_memory(checkpoint: Path) -> None:
    """`info --json` reports operations, attention backends, exactness and memory."""
    process = ramify("info", checkpoint, "--json")

    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    assert report["operations"]["cpu"].startswith("chosen: the first of cpu, torch")
    assert report["operations"]["torch"] == "not used: would do"
    assert report["attention backends"]["cpu"].startswith("chosen: the first of cpu")
    assert "exact" in report["attention backends"]["sdpa"]
    assert report["exactness"]["exact"] is True
    assert any(name.startswith("attention ") for name in report["exactness"])
    assert {"weights", "K/V per token", "K/V pool", "resident"} <= set(report["memory"])
    assert "at most" in report["memory"]["K/V pool"]


def test_info_tells_from_how_many_pages_a_tier_pays(checkpoint: Path, tmp_path: Path) -> None:
    """Or that none was read yet, or that computing is faster at any length; without tiers nothing."""
    steps = {"step_s": 0.0, "token_s": 1.0, "read_s": 0.0}
    costs = {"slow": steps, "fast": {**steps, "token_s": 0.0}}
    for name, cost in costs.items():
        (tmp_path / name).write_text(json.dumps(cost))
    tiers = ("--cache-host", "20MB", "--cache-dir", tmp_path / "pages", "--cache-disk", "600MB")

    reports = {
        name: json.loads(
            ramify("info", checkpoint, *tiers, "--cache-cost", tmp_path / name, "--json").stdout
        )["cache tiers"]
        for name in costs
    }

    assert re.match(r"[\d.e-]+ ms and .*: pays from 1 page \(16 tokens\); a page: computed in 16",
                    reports["slow"]["host"])  # fmt: skip
    assert "computing is faster at any length; " in reports["fast"]["host"]
    assert reports["slow"]["disk"] == "not measured: nothing was read yet"
    assert "cache tiers" not in json.loads(ramify("info", checkpoint, "--json").stdout)


def test_ops_torch_uses_nothing_compiled(checkpoint: Path) -> None:
    """`--ops torch` takes torch's operations and attention over them."""
    process = ramify("info", checkpoint, "--ops", "torch", "--json")

    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    operations = report["operations"]
    assert operations.pop("triton").startswith("not used")
    assert operations == {"cpu": "not used: would do", "torch": "chosen: asked for"}
    assert report["attention backends"]["cpu"] == "not used: would do"
    assert report["attention backends"]["blocked"].startswith("chosen")
    assert not any("kernel" in str(verdict) for verdict in report["exactness"].values())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["generate", "{ck}"], ["no prompt", "--prompt"]),
        (["generate", "{ck}", "--prompt", ""], ["0 tokens"]),
        (["generate", "{ck}", "--prompt", "x" * 5000], ["5001", "4096"]),
        (["generate", "{ck}", "--prompt", "x", "--temperature", "-1"], ["temperature", "-1"]),
        (["generate", "{ck}", "--prompt", "x", "--page-size", "0"], ["page_size", "0"]),
        (["generate", "{ck}", "--prompt", "x", "--kv-cache-tokens", "8"], ["kv_cache_tokens=8"]),
        (["generate", "{ck}", "--prompt", "x", "--attention-backend", "no"], ["no", "cpu"]),
        (["generate", "{ck}", "--prompt", "x", "--attention-backend", "sdpa"], ["exact"]),
        (["generate", "{ck}", "--prompt-file", "nowhere.txt"], ["nowhere.txt"]),
        (["generate", "no/such/dir", "--prompt", "x"], ["no/such/dir"]),
        (["info", "no/such/dir"], ["no/such/dir"]),
        (["demo", "--model", "{ck}", "--document", "nowhere.txt"], ["nowhere.txt"]),
        (["info", "{ck}", "--kv-cache-tokens", str(10**13)], ["kv_cache_tokens", "free"]),
        (["info", "{ck}", "--max-num-seqs", str(10**12)], ["max_num_seqs", "free"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    checkpoint: Path, args: list[str], words: list[str]
) -> None:
    """Bad input prints one error that names the value and the limit, without a traceback."""
    process = ramify(*(arg.replace("{ck}", str(checkpoint)) for arg in args))

    assert process.returncode == 2, process.stdout
    assert process.stderr.count("error:") == 1
    assert "Traceback" not in process.stderr
    assert all(word in process.stderr for word in words), process.stderr


def test_an_unknown_option_is_refused(checkpoint: Path) -> None:
    """A misspelt option exits with code 2 and is named in the error."""
    process = ramify("generate", checkpoint, "--promt", "x")

    assert process.returncode == 2
    assert "--promt" in process.stderr
