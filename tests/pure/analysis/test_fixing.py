"""What mended prompts look like: a fix undoes its cause, and leaves the rest as sent."""

import json
from collections.abc import Sequence
from dataclasses import replace

from ramify.analysis.compare.normal_forms import write_as
from ramify.analysis.compare.spacing import places_in_text
from ramify.analysis.corpus import Corpus
from ramify.analysis.linting import Linted, learn_templates, lint_parts
from ramify.analysis.records import LoggedRequest, Segment, SegmentKind
from ramify.analysis.savings.fixing import Fix
from ramify.analysis.verdicts import CauseName

RULES = "".join(f"Rule {n}: answer politely about topic {n}, and never guess. " for n in range(60))


def chat(*texts: str, system: str = RULES) -> list[Segment]:
    """A system prompt, then user and assistant in turn; a text that begins with { is a tool's."""
    roles = ["tool call_1" if text.startswith("{") else "" for text in texts]
    return [
        Segment("system", SegmentKind.SYSTEM, system),
        *(
            Segment(
                f"messages[{at}]",
                SegmentKind.MESSAGE,
                text,
                label=roles[at] or ("user", "assistant")[at % 2],
            )
            for at, text in enumerate(texts)
        ),
    ]


def linted(*prompts: Sequence[Segment]) -> tuple[Corpus, Linted]:
    corpus = Corpus()
    for line, prompt in enumerate(prompts, 1):
        corpus.add(LoggedRequest("log.jsonl", line, segments=tuple(prompt), api="openai-chat"))
    return corpus, lint_parts(corpus)


def mended_texts(corpus: Corpus, log: Linted, number: int, *causes: CauseName) -> list[str]:
    """Texts of a request's segments with all findings of these causes mended."""
    findings = log.report.findings
    fixes = [Fix(item.cause, item.segment) for item in findings if item.cause in causes]
    assert {fix.cause for fix in fixes} == set(causes)
    mended = log.fixer.mend(corpus.requests[number], fixes)
    return [corpus.text(unit) for unit in mended.units.tolist()]


QUESTION, ANSWER = "Where is the parcel that I sent to Lisbon?", "It has left the depot in Bremen."
MORE, LAST = "And when will it arrive there, roughly?", "Within three days, says the carrier."


def test_a_later_place_of_a_cause_is_mended_with_the_first() -> None:
    """White space differs in two answers; the finding names the first, its fix mends both."""
    first = chat(QUESTION, ANSWER, MORE, LAST, "Thanks, that is all I wanted to know.")
    later = chat(QUESTION, ANSWER + " \n", MORE, LAST + " \n", "Thanks, that is all I wanted to know.", "Good bye then.", "Wait, one more question, please.")  # fmt: skip
    corpus, log = linted(first, later)

    texts = mended_texts(corpus, log, 1, CauseName.WHITESPACE)

    assert {item.segment for item in log.report.findings} == {"messages[1]"}
    assert texts[:6] == mended_texts(corpus, log, 0, CauseName.WHITESPACE)


def test_a_mended_value_keeps_the_white_space_of_its_text() -> None:
    """Two causes in a system prompt: mending the clock alone leaves the double blanks."""
    log_texts = [f"Now: 2026-11-{day:02d} 10:{day}:00\n\n{RULES}" for day in (11, 12, 13, 14)]
    log_texts[3] = log_texts[3].replace(", ", ",  ")
    corpus, log = linted(*(chat(f"{QUESTION} {text[-9:]}", system=text) for text in log_texts))

    first, last = (mended_texts(corpus, log, at, CauseName.CLOCK)[0] for at in (0, 3))

    assert first != last
    assert first == last.replace(",  ", ", ")
    assert "\n\n" in first


def test_dropped_messages_come_back_at_their_places() -> None:
    """A client that drops the oldest turns: the mended prompt is the whole conversation."""
    turns = [QUESTION, ANSWER, MORE, LAST, "Thanks. Can I change the address?", "Yes, until noon."]
    whole = [*turns, "Please change it to number 12 then."]
    corpus, log = linted(chat(*turns[:5]), chat(*whole[:2], *whole[4:]))

    assert mended_texts(corpus, log, 1, CauseName.HISTORY_EDITED) == [RULES, *whole]


def test_a_block_of_context_is_sent_once() -> None:
    """It stays in the message where it was sent first; the newest message has it no more."""
    block = "<memory>\nThe buyer lives in Lisbon and prefers short answers.\n</memory>"
    turns = [QUESTION, ANSWER, MORE, LAST, "Thanks. Can I change the address?"]
    sent = [[*turns[: 2 * at], f"{turns[2 * at]}\n\n{block}"] for at in range(3)]
    corpus, log = linted(*(chat(*texts) for texts in sent))

    texts = [mended_texts(corpus, log, at, CauseName.CONTEXT_MOVED) for at in range(3)]

    assert texts == [[RULES, *sent[0], *turns[1 : 2 * at + 1]] for at in range(3)]


def test_the_breakpoint_of_a_dropped_block_ends_at_the_segment_before() -> None:
    """A client marks the end of its prompt, whichever segment that is."""
    block = "<memory>\nThe buyer lives in Lisbon and prefers short answers.\n</memory>"
    turns = [QUESTION, ANSWER, MORE]
    prompts = []
    for num_turns in (1, 3):
        *older, newest = chat(*turns[:num_turns])
        path = newest.path
        prompts.append([
            *older,
            replace(newest, path=f"{path}.content[0]"),
            replace(newest, path=f"{path}.content[1]", text=block, breakpoint_ttl_s=300.0),
        ])  # fmt: skip
    corpus, log = linted(*prompts)
    fixes = [Fix(item.cause, item.segment) for item in log.report.findings]

    mended = log.fixer.mend(corpus.requests[1], fixes)

    assert [corpus.text(unit) for unit in mended.units.tolist()] == [
        RULES,
        QUESTION,
        block,
        *turns[1:],
    ]
    assert mended.breakpoints == ((4, 300.0),)


def test_json_takes_the_form_that_most_requests_have() -> None:
    """A tool's answer with sorted keys in one request of three: it stays unsorted, blanks and all."""
    value = {"status": "delayed", "id": 7, "note": "The parcel waits at the customs office."}
    usual, sorted_once = json.dumps(value), json.dumps(value, sort_keys=True)
    prompts = [
        chat(QUESTION, ANSWER, result, *rest)
        for result, rest in [
            (sorted_once, ()),
            (usual, (LAST, "Thanks, and what now?")),
            (usual, (LAST, "Thanks, and what now?", "Wait.", "How long do I have to wait?")),
        ]
    ]
    corpus, log = linted(*prompts)

    assert mended_texts(corpus, log, 0, CauseName.KEY_ORDER)[3] == usual


def test_reasoning_that_was_shown_once_comes_back() -> None:
    """Of two answers with reasoning, one shows it in a tool loop and the other never does."""

    def thought(at: int, text: str) -> Segment:
        path = f"messages[{at}].reasoning_content"
        return Segment(path, SegmentKind.MESSAGE, text, label="assistant reasoning_content")

    call, why = '{"status": "in customs"}', "The user wants to know the place: ask the carrier."
    loop = chat(QUESTION, "I ask the carrier.", call)
    loop.insert(2, thought(1, why))
    later = chat(QUESTION, "I ask the carrier.", call, LAST, "Thanks, and what does customs want?")
    corpus, log = linted(loop, later)

    shown = mended_texts(corpus, log, 1, CauseName.REASONING_DROPPED)

    assert shown == [RULES, QUESTION, why, "I ask the carrier.", call, *shown[-2:]]


def test_json_is_written_in_the_style_of_a_text() -> None:
    """Blanks, indents and escapes are those of the text; another style is None."""
    value = {"b": "ü", "a": [1, 2]}
    other = {"x": "é", "y": {}}

    for style in ({}, {"indent": 2}, {"separators": (",", ":")}, {"ensure_ascii": False}):
        assert write_as(value, json.dumps(other, **style)) == json.dumps(value, **style)
    assert write_as(value, '{ "x":1 }') is None


def test_places_of_the_normal_form_are_found_in_the_text() -> None:
    """White space moves a place; texts of other words have none."""
    assert places_in_text("a  b\r\n\tcd", "a b\ncd", [(2, 3), (5, 6)]) == [(3, 4), (8, 9)]
    assert places_in_text("a b", "a c d", [(0, 1)]) is None


def test_a_mended_prompt_numbers_its_messages_as_they_stand() -> None:
    """A note that goes back into the history makes all later messages one more."""
    note = Segment("messages[2]", SegmentKind.MESSAGE, f"Note: {QUESTION} {LAST}", label="system")
    talk = [*chat(QUESTION, ANSWER), note]
    talk.append(Segment("messages[3]", SegmentKind.MESSAGE, MORE, label="user"))
    hoisted = chat(QUESTION, ANSWER, MORE, LAST, "Thanks.", system=f"{RULES}\n\n{note.text}")
    corpus, log = linted(talk, hoisted)
    (finding,) = log.report.findings
    assert finding.cause is CauseName.SYSTEM_HOISTED

    mended = log.fixer.mend(corpus.requests[1], [Fix(finding.cause, finding.segment)])

    assert [corpus.text(unit) for unit in mended.units.tolist()][3:5] == [note.text, MORE]
    assert mended.paths == ("system", *(f"messages[{at}]" for at in range(6)))


def test_a_fix_of_a_message_holds_for_its_first_block() -> None:
    """A text is the content here and the first block of a list there: white space goes in both."""
    corpus, log = linted(
        *(
            [Segment(path, SegmentKind.MESSAGE, f"{start}  {RULES}", label="user")]
            for path, start in (("messages[0]", "Bremen"), ("messages[0].content[0]", "Lisbon"))
        )
    )

    for segment in ("messages[0]", "messages[0].content[0]"):
        fixes = [Fix(CauseName.WHITESPACE, segment)]
        mended = [log.fixer.mend(request, fixes).units.tolist()[0] for request in corpus]
        assert [corpus.text(unit)[:12] for unit in mended] == ["Bremen Rule ", "Lisbon Rule "]


def test_an_app_that_has_a_sentence_of_another_is_another_template() -> None:
    """The sentence is the longest of both prompts, and nothing else is the same."""
    shared = (
        "If the carrier has lost the parcel, then ask for the number of the label and the date. "
    )
    words = [["Oslo", "Riga"], "the depot opens early".split(), "a harbour never sleeps".split()]
    heads = [
        " ".join(f"{place} {word}." for word in words[at + 1]) * 9
        for at, place in enumerate(words[0])
    ]
    corpus, _ = linted(*(chat(QUESTION, system=f"{head}\n\n{shared}\n\n{head}") for head in heads))

    templates = learn_templates(corpus)

    first, second = (templates.template_of(int(request.units[0])) for request in corpus)
    assert first is not second


def test_a_sentence_before_a_cue_is_no_cue() -> None:
    """An id behind `Trace:` is an id, though the sentence before ends with `next step`."""
    systems = [f"{RULES} Then name the next step. Trace: {n}f3c0a94a79d2a{n}" for n in (3, 5)]

    _, log = linted(*(chat(f"{QUESTION} {at}", system=text) for at, text in enumerate(systems)))

    assert [finding.cause for finding in log.report.findings] == [CauseName.RANDOM_ID]
