"""The parts of a report add up, and each number can be checked against the log."""

import json
from pathlib import Path
from typing import Any

import pytest

from ramify.analysis.corpus import Corpus
from ramify.analysis.reader import ReadQuality
from ramify.analysis.report.analyze import analyze, read_corpus
from ramify.analysis.report.document import Analysis
from ramify.analysis.report.page.html import analysis_as_html
from ramify.analysis.report.privacy import hide_texts
from ramify.analysis.report.wording.headline import headline
from ramify.analysis.report.writers.as_json import analysis_as_json
from ramify.analysis.report.writers.markdown import analysis_as_markdown
from tests.pure.analysis.planted_formats import planted_log, write_log
from tests.pure.analysis.report_logs import chat_row, write_clock_log, write_rows
from tests.pure.analysis.transcripts import Transcript


def analysis_of(*paths: Path) -> Analysis:
    quality = ReadQuality()
    return analyze(read_corpus(list(paths), quality), title="log", quality=quality)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("planted") / "log.jsonl"
    write_log(planted_log(5, "helicone", num_requests=120), "helicone", path)
    return path


@pytest.fixture(scope="module")
def analysis(planted: Path) -> Analysis:
    return analysis_of(planted)


def test_the_tree_holds_every_token_once(planted: Path, analysis: Analysis) -> None:
    """Children are never wider than their parent, and the root has all tokens."""
    corpus = read_corpus([planted], ReadQuality())
    tree = analysis.tree
    below = [0] * len(tree)

    for node in tree[1:]:
        below[node.parent] += node.total

    assert len(tree) > 5
    assert tree[0].total == sum(map(corpus.num_tokens, corpus))
    for node, inside in zip(tree, below, strict=True):
        assert inside + node.num_own <= node.total
        assert 0 <= node.num_read <= node.num_own
    assert all(node.parent < at for at, node in enumerate(tree))


def test_the_waterfall_arrives_at_each_level(analysis: Analysis) -> None:
    """Every step's level is the level before plus its change; levels equal the hit rates."""
    level = 0.0

    for step in analysis.waterfall:
        if not step.is_level:
            assert step.level == pytest.approx(level + step.change)
        elif level:
            assert step.level == pytest.approx(level, abs=1e-9)
        level = step.level

    names = [step.name for step in analysis.waterfall if step.is_level]
    assert names == ["possible, mended", "as sent", "by rule"]
    possible = analysis.rate("possible")
    assert possible is not None
    assert analysis.waterfall[0].level == pytest.approx(possible.share)


def test_unexplained_is_shown_where_usage_disagrees(tmp_path: Path) -> None:
    """Usage without a hit on equal prompts leaves a step that says so."""
    rows = [chat_row(number, system="You are kind. " * 800, question="Why?") for number in range(6)]
    log = write_rows(tmp_path / "log.jsonl", rows)

    steps = analysis_of(log).waterfall

    assert steps[-1].name == "reported" and steps[-1].level == 0
    assert steps[-2].name == "unexplained" and steps[-2].change < -0.5


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for item in [*value, *value.values()] for text in _texts(item)]
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []


def test_a_private_report_has_no_text_of_the_log(tmp_path: Path) -> None:
    """No word of a prompt, no file name and no conversation is in any output."""
    rows = [
        chat_row(
            number,
            system=f"Now: 2026-11-20 10:{number:02d}:17. SECRETWORD helps QUESTIONER. " * 300,
            question=f"QUESTIONER {number}",
        )
        | {"session_id": f"SESSIONNAME-{number % 2}"}
        for number in range(10)
    ]
    log = write_rows(tmp_path / "FILENAME.jsonl", rows)
    log.write_text(log.read_text() + "{BROKENLINE\n")
    analysis = analysis_of(log)

    private = hide_texts(analysis)

    outputs = [
        analysis_as_html(private),
        json.dumps(analysis_as_json(private)),
        analysis_as_markdown(private),
    ]
    for output in outputs:
        for word in ("SECRETWORD", "QUESTIONER", "SESSIONNAME", "FILENAME", "BROKENLINE", "10:03"):
            assert word not in output
    assert any("SECRETWORD" in text for text in _texts(analysis_as_json(analysis)))


def test_the_page_says_where_its_numbers_come_from(analysis: Analysis) -> None:
    """Tokenizer, date and sources of the rules, bad lines and the requests with usage are there."""
    page = analysis_as_html(analysis)
    section = page[page.index('id="provenance"') :]

    for name in ("tokenizer", "date of the rules", "sources of the rules", "bad lines"):
        assert f'<th scope="row">{name}</th>' in section
    assert f"requests with usage</th><td>{analysis.lint.quality['num_with_usage']}</td>" in section


def test_a_log_of_one_request_is_a_report(tmp_path: Path) -> None:
    """Nothing is shared, nothing is lost, and nothing fails."""
    analysis = analysis_of(write_clock_log(tmp_path / "log.jsonl", num_requests=1))

    assert "log" in analysis_as_html(analysis)
    assert analysis.tokens_lost == 0


def test_an_empty_corpus_is_a_report() -> None:
    """A library caller with no requests gets a warning, not an error."""
    analysis = analyze(Corpus(), title="nothing")

    assert analysis.warnings and "nothing" in analysis_as_html(analysis)


def test_an_interrupted_reading_is_a_partial_report(planted: Path) -> None:
    """Ctrl-C keeps the requests that were read, and the report says that the rest is missing."""
    quality = ReadQuality()
    calls = iter(range(10**9))

    def interrupt(_part: str, _done: int, _total: int) -> None:
        if next(calls) == 3:
            raise KeyboardInterrupt

    corpus = read_corpus([planted, planted], quality, progress=interrupt)
    analysis = analyze(corpus, title="log", quality=quality)

    assert 0 < len(corpus) < 250 and analysis.is_partial
    assert "interrupted" in analysis.warnings[0]


def test_an_interrupted_part_is_left_out(planted: Path) -> None:
    """Ctrl-C while curves are computed leaves a report without curves."""
    corpus = read_corpus([planted], ReadQuality())

    def interrupt(part: str, _done: int, _total: int) -> None:
        if part == "stack distances":
            raise KeyboardInterrupt

    analysis = analyze(corpus, title="log", progress=interrupt)

    assert analysis.is_partial and analysis.lint.findings
    assert "interrupted" in analysis_as_html(analysis)


@pytest.mark.parametrize("texts_first", [True, False])
def test_texts_and_hashed_rows_have_one_chart(tmp_path: Path, texts_first: bool) -> None:
    """Pages are those of the hashes, whichever come first."""
    texts = [chat_row(n, system="Answer.", question=f"Question {n}?") for n in range(3)]
    hashed: list[dict[str, Any]] = [
        {"timestamp": n, "input_length": 1024, "output_length": 1, "hash_ids": [0, n]}
        for n in range(1, 4)
    ]
    path = tmp_path / "mixed.jsonl"
    write_rows(path, [*texts, *hashed] if texts_first else [*hashed, *texts])

    analysis = analyze(read_corpus([path], ReadQuality()), title="mixed")

    assert analysis.curves is not None and analysis.curves.page_size == 512


def _log_with_usage_of_some(path: Path) -> Path:
    """Prompts of two providers; every second one has usage, billed at twice the counted tokens."""
    system = "You answer questions about trains. " * 120
    lines = []
    for number in range(20):
        provider, model = (("openai", "gpt-4o"), ("vllm", "llama"))[number % 4 == 3]
        body = {
            "model": model,
            "messages": [
                {"role": "system", "content": system},
                {"role": "user", "content": f"Question {number} " + "and more " * 40},
            ],
        }
        row: dict[str, object] = {"request": body, "provider": provider}
        if number % 2:
            details = {"cached_tokens": 500 if number > 1 else 0}
            usage = {"prompt_tokens": 2000, "prompt_tokens_details": details}
            row["response"] = {"model": model, "usage": usage}
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_rates_count_the_same_requests_and_tokens(tmp_path: Path) -> None:
    """With usage in half of the log, all three bars and the waterfall are over that half, as billed."""
    log = _log_with_usage_of_some(tmp_path / "log.jsonl")

    analysis = analyze(read_corpus([log], ReadQuality()), title="log")

    assert analysis.lint.num_requests == 20
    assert [rate.name for rate in analysis.rates] == ["reported", "by_rule", "possible"]
    assert {(rate.num_input, rate.num_requests) for rate in analysis.rates} == {(20_000, 10)}
    reported, by_rule, possible = analysis.rates
    assert reported.num_read == 4500
    assert reported.share < by_rule.share <= possible.share < 1
    levels = {step.name: step.level for step in analysis.waterfall if step.is_level}
    assert levels["reported"] == reported.share
    assert levels["by rule"] == by_rule.share
    assert levels["possible, mended"] == possible.share
    assert "tokens of the 10 requests that log cached tokens" in headline(analysis)


def test_a_capacity_is_a_step_of_the_waterfall(tmp_path: Path) -> None:
    """What eviction costs is one step; the levels are those of replays with and without it."""
    shared = ["".join(f"{word} {number}. " for number in range(400)) for word in ("ab", "cd", "ef")]
    rows = [
        {"model": "m", "messages": [{"role": "user", "content": shared[number % 3]}]}
        for number in range(12)
    ]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    corpus = read_corpus([log], ReadQuality())

    whole = analyze(corpus, title="log", provider="vllm")
    small = analyze(corpus, title="log", provider="vllm", capacity=2000)

    infinite, by_rule = whole.rate("by_rule"), small.rate("by_rule")
    assert infinite is not None and by_rule is not None
    assert infinite.share > 0.7
    assert by_rule.share == 0
    (step,) = [step for step in small.waterfall if step.name == "capacity"]
    assert abs(step.change + infinite.share) < 0.01
    assert not [step for step in whole.waterfall if step.name == "capacity"]
    assert "at a capacity of 2,000 tokens" in headline(small)


def test_a_log_without_whole_prompts_has_the_reported_rate_only(tmp_path: Path) -> None:
    """Transcripts hide the system prompt and the tools: nothing is predicted from what is left."""
    transcript, last = Transcript(), None
    for number in range(4):
        question = transcript.user(last, f"Question {number}")
        last = transcript.answer(question, f"msg_{number}", {"type": "text", "text": "Yes."})
    log = write_rows(tmp_path / "log.jsonl", transcript.lines)

    analysis = analyze(read_corpus([log], ReadQuality()), title="log")

    (rate,) = analysis.rates
    assert (rate.name, rate.num_read, rate.num_input) == ("reported", 4 * 9000, 4 * 9302)
    assert analysis.waterfall == ()
    assert any("No request has its whole prompt" in warning for warning in analysis.warnings)
