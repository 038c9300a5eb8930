"""Fixed text behind changing text, and documents in another order: `context_order`."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ramify.analysis.corpus import Corpus
from ramify.analysis.linting import learn_templates
from ramify.analysis.reader import ReadQuality
from ramify.analysis.records import LoggedRequest, Segment, SegmentKind
from ramify.analysis.report.analyze import analyze, read_corpus
from ramify.analysis.report.document import Analysis
from tests.pure.analysis.mended_logs import MIXED, linted_log

NUM_REQUESTS, NUM_DOCUMENTS = 24, 6
PROSE = "The {0}th report of the harbour says that {1} ships came from {2} and left with {3} t of salt. "
Message = dict[str, Any]


def _document(number: int) -> str:
    rng = random.Random(number)
    lines = [PROSE.format(number, *(rng.randrange(1000) for _ in range(3))) for _ in range(12)]
    return f"Document {number}: {''.join(lines).strip()}"


DOCUMENTS = [_document(number) for number in range(NUM_DOCUMENTS)]


def _as_text(blocks: Sequence[str]) -> list[Message]:
    return [{"role": "user", "content": "\n\n".join(blocks)}]


def _as_parts(blocks: Sequence[str]) -> list[Message]:
    return [{"role": "user", "content": [{"type": "text", "text": text} for text in blocks]}]


def _as_tags(blocks: Sequence[str]) -> list[Message]:
    text = "\n".join(f"<document>{block}</document>" for block in blocks)
    return [{"role": "user", "content": text}]


def _as_system(blocks: Sequence[str]) -> list[Message]:
    text = "\n\n".join(blocks)
    return [{"role": "system", "content": text}, {"role": "user", "content": "Answer."}]


FORMS = (_as_text, _as_parts, _as_tags, _as_system)


def _write(path: Path, messages: Sequence[Sequence[Message]]) -> Analysis:
    bodies = ({"model": "gpt-4.1-mini", "messages": item} for item in messages)
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    quality = ReadQuality()
    return analyze(read_corpus(path, quality), title="log", quality=quality)


def _ordered_and_mended(
    path: Path, form: Callable[[Sequence[str]], list[Message]]
) -> tuple[Analysis, Analysis]:
    """The question before documents in changing order; and sorted documents, the question last."""
    rng = random.Random(7)
    sent, mended = [], []
    for number in range(NUM_REQUESTS):
        question = f"Question {number}: how many ships came from {rng.randrange(10**6)}?"
        sent.append(form([question, *rng.sample(DOCUMENTS, NUM_DOCUMENTS)]))
        mended.append(form([*DOCUMENTS, question]))
    return _write(path / "sent.jsonl", sent), _write(path / "mended.jsonl", mended)


def _share(analysis: Analysis, name: str) -> float:
    rate = analysis.rate(name)
    assert rate is not None
    return rate.share


@pytest.mark.parametrize("form", FORMS)
def test_documents_in_changing_order_save_what_the_mended_form_reads(
    tmp_path: Path, form: Callable[[Sequence[str]], list[Message]]
) -> None:
    """One finding, at the message, that brings the log to the hit rate of its mended form."""
    sent, mended = _ordered_and_mended(tmp_path, form)

    [finding] = sent.lint.findings
    place = "messages[0]"
    assert (finding.cause, finding.certainty, finding.segment) == ("context_order", "proved", place)
    assert finding.num_requests == NUM_REQUESTS - 1
    goal = _share(mended, "by_rule")
    assert goal > 0.85
    reached = _share(sent, "by_rule") + finding.saving.tokens / sent.num_counted
    assert reached == pytest.approx(goal, abs=0.02)
    assert _share(sent, "possible") == pytest.approx(_share(mended, "possible"), abs=0.01)
    assert not mended.lint.findings


def test_instructions_behind_changing_text_are_found(tmp_path: Path) -> None:
    """A snippet that changes, and in each request the same instructions behind it."""
    rules = "\n".join(f"- Rule {number}: {PROSE.format(*range(4))}" for number in range(60))
    messages = [
        [{"role": "user", "content": f"{_document(100 + number)}\n\n{rules}"}]
        for number in range(NUM_REQUESTS)
    ]

    [finding] = _write(tmp_path / "log.jsonl", messages).lint.findings

    assert finding.cause == "context_order"
    assert finding.saving.tokens > 1000 * (NUM_REQUESTS - 1)


def test_a_document_that_others_have_comes_before_one_that_none_has(tmp_path: Path) -> None:
    """Of a large store each request has few documents: those of most requests stand first."""
    rng = random.Random(3)
    store = [_document(number) for number in range(40)]
    weights = [1 / (1 + number) for number in range(len(store))]
    chosen = [[*dict.fromkeys(rng.choices(store, weights, k=8))] for _ in range(40)]
    num_uses = Counter(document for documents in chosen for document in documents)
    by_use = [sorted(item, key=lambda text: -num_uses[text]) for item in chosen]

    sent = _write(
        tmp_path / "sent.jsonl",
        [_as_text([f"Question {number}?", *item]) for number, item in enumerate(chosen)],
    )
    mended = _write(
        tmp_path / "mended.jsonl",
        [_as_text([*item, f"Question {number}?"]) for number, item in enumerate(by_use)],
    )

    [saving] = [item.saving for item in sent.lint.findings if item.cause == "context_order"]
    assert _share(sent, "by_rule") == 0.0
    goal = _share(mended, "by_rule")
    assert goal > 0.1
    assert saving.tokens / sent.num_counted == pytest.approx(goal, abs=0.02)


def test_other_documents_are_new_content(tmp_path: Path) -> None:
    """What no other request has may stand where it likes; so may answers and results of tools."""
    fresh = [
        _as_text([f"Question {number}?", _document(100 + number), _document(200 + number)])
        for number in range(NUM_REQUESTS)
    ]
    rng = random.Random(1)
    said = [
        [
            {"role": "user", "content": "Look it up."},
            {"role": "assistant", "content": f"Answer {number}.\n\n{rng.choice(DOCUMENTS)}"},
            {"role": "user", "content": "Thanks."},
        ]
        for number in range(NUM_REQUESTS)
    ]

    for name, messages in (("fresh", fresh), ("said", said)):
        analysis = _write(tmp_path / f"{name}.jsonl", messages)

        assert "context_order" not in {finding.cause for finding in analysis.lint.findings}


@pytest.mark.parametrize("provider", ["openai", "vllm"])
@pytest.mark.parametrize("seed", range(71, 73))
def test_possible_is_not_below_what_any_listed_change_gives(
    tmp_path: Path, seed: int, provider: str
) -> None:
    """By rule plus the saving of any finding, and of all together."""
    corpus = linted_log(seed, ("openai_chat", "litellm")[seed % 2], MIXED, tmp_path, 60).corpus

    analysis = analyze(corpus, title="planted", provider=provider)

    savings = [analysis.lint.saving_all, *(item.saving for item in analysis.lint.findings)]
    possible, by_rule = _share(analysis, "possible"), _share(analysis, "by_rule")
    levels = {step.name: step.level for step in analysis.waterfall if step.is_level}
    assert levels["possible, mended"] == pytest.approx(possible)
    for saving in savings:
        assert possible >= min(1.0, by_rule + saving.tokens / analysis.num_counted) - 1e-9


def test_blocks_of_equally_many_messages_keep_the_order_in_which_they_were_sent() -> None:
    """The same report of the same log in every process: hashes of texts differ between processes."""
    blocks = [f"Paragraph {number}: " + "harbour stone measure " * 4 for number in range(30)]
    corpus = Corpus()
    for number, texts in enumerate((blocks, blocks[::-1])):
        segment = Segment("messages[0]", SegmentKind.MESSAGE, "\n\n".join(texts), label="user")
        corpus.add(LoggedRequest("log", number, segments=(segment,)))

    order = learn_templates(corpus).order

    [first], [second] = (request.units.tolist() for request in corpus)
    assert order.mend(first) == first
    assert order.mend(second) == first
