"""Prompt rules: changing text of known clients goes out of the system prompt, is reported, and is not lost."""

import re
import time
from pathlib import Path
from typing import Any

import pytest

from ramify.errors import ConfigError
from ramify.prompt_rules import MAX_TEXT_CHARS, RULES, Target, rules_named, take_out
from ramify.server.run import ServeInputs, ServeOptions
from tests.pure.prefix_requests import (
    APIS,
    CHAT,
    MESSAGES,
    NESTED,
    OLLAMA,
    RESPONSES,
    body,
    cache_of,
)
from tests.pure.server_bench import TOOL_TEMPLATE, Answer, ServerBench, run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "server.md"
SENTENCE = "Here is some useful information about the environment you are running in:\n"
ENV = "<env>\n  Working directory: /home/a\n  Is directory a git repo: yes\n  Today's date: Fri Jun 05 2026\n</env>"
LIST = (
    "# Environment\nYou have been invoked in the following environment: \n"
    " - Primary working directory: /home/a\n - Platform: linux"
)
GIT = (
    "gitStatus: This is the git status at the start of the conversation. It is a snapshot.\n"
    "Current branch: main\n\nStatus:\n M a.py"
)
BILLING_LINE = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5;"
TAKEN = {
    "billing-header": [BILLING_LINE, "x-anthropic-billing-header: cc_version=9;"],
    "env-block": [ENV, SENTENCE + ENV, LIST, SENTENCE.replace("some ", "") + ENV],
    "git-status": [GIT],
    "date-line": [
        "Today's date: Fri Jun 05 2026",
        "  Today\u2019s date is 2026-06-05",
        "Today's date is now: 6/5/2026",
        "Today is Friday, June 5th, 2026.",
        "- **Current date:** December 17, 2025",
        "The current date is 2026-06-05.",
        "Current Date: 2026\u5e7406\u670805\u65e5",
    ],
    "clock-line": [
        "Current date and time: Friday, June 5, 2026, 03:04:20 PM +03:00",
        "Current time: 2026-06-05T15:04:20Z",
        "The current date and time is Friday, June 5, 2026 3:04 PM.",
        "Current date/time: 2026-06-05 15:04 (Europe/Berlin)",
        "Current datetime: 2026-06-05 15:04 CEST",
    ],
    "session-id": ["Session ID: 0b1f-77a2", "- conversation_id=8f14e45fceea167a"],
    "request-id": [
        "Request ID: req_01J8ZQ",
        "x-request-id: 8f14e45f",
        "Trace-ID: 4bf92f3577b34da6",
    ],
}
STAYS = [
    "Today is the day on which 5 lamps are sold.",
    "Current date: the day of the 2nd order",
    "Ask for today's date: 2026-06-05 is an example.",
    "The environment is <env> here.",
    "Session ID: of the user",
    "Request IDs: 12345678",
    "Send x-anthropic-billing-header: never.",
    "Today is 50% off",
    "<env>\nWorking directory: /home/a",
    "Current time: unknown",
]


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in TAKEN.items() for text in texts]
)
def test_a_rule_takes_out_what_its_name_says(name: str, text: str) -> None:
    """Whole lines and nothing else, wherever they stand; no rule takes another's."""
    everything = rules_named(RULES)
    around = {("", ""), ("You are an agent.\n\n", ""), ("", "\nBe brief."), ("A\n", "\nB\n")}
    if name == "git-status":  # it goes on to the end
        around = {("", ""), ("You are an agent.\n\n", "")}
    for before, after in around:
        rest, pieces = take_out(before + text + after, everything)

        assert [(rule.name, piece) for rule, piece in pieces] == [(name, text)]
        assert rest == before.removesuffix("\n" * (not after)) + after.removeprefix("\n")
        assert take_out(rest, everything) == (rest, [])


@pytest.mark.parametrize("text", STAYS)
def test_sentences_stay(text: str) -> None:
    """A line with any other word is content."""
    assert take_out(f"Rules.\n{text}\nMore.", rules_named(RULES)) == (f"Rules.\n{text}\nMore.", [])


def test_hostile_text_takes_linear_time() -> None:
    """60 kB of beginnings that lead nowhere, for each pattern."""
    lines = ["today" + " " * 500, "*" * 500, "<env>", " " * 500 + "<env>", "# Environment", " - a"]
    lines += [
        "session id: " + "a" * 500,
        "current date" + ":" * 50 + " " * 300,
        SENTENCE,
        "\t" * 999,
    ]
    lines += ["gitStatus: This is the git status at the star", "x-anthropic-billing-header"]
    begin_s = time.perf_counter()

    for line in lines:
        for text in (line * (60_000 // len(line)), f"{line}\n" * (60_000 // len(line))):
            take_out(text, rules_named(RULES))

    assert time.perf_counter() - begin_s < 5.0


def test_a_text_beyond_the_limit_stays_but_for_what_is_not_for_the_model() -> None:
    """No real system prompt is so long, and a search would hold up everybody."""
    header, date = "x-anthropic-billing-header: cc=1;\n", "Today's date: 2026-11-30\n"
    rest = "a" * MAX_TEXT_CHARS

    text, pieces = take_out(header + date + rest, rules_named(RULES))

    assert text == date + rest
    assert [rule.name for rule, _ in pieces] == ["billing-header"]


def test_names_of_rules_are_checked_before_the_model_loads() -> None:
    """An unknown one is an error that lists them; the order of the option does not matter."""
    names = tuple(reversed(RULES))
    with pytest.raises(
        ConfigError, match="no rule 'date'; the rules are billing-header, env-block"
    ):
        ServeInputs.of(ServeOptions(prompt_rules=("date",)))

    assert [rule.name for rule in rules_named(names)] == [*RULES]
    assert rules_named(["", " date-line"]) == (RULES["date-line"],)


def test_the_page_has_every_rule() -> None:
    """Its table, with the place where the text goes."""
    page = PAGE.read_text(encoding="utf-8").partition("### Prompt rules")[2]
    rows = re.findall(r"^\| `([a-z-]+)` \| .* \| (.*) \|$", page, re.MULTILINE)
    places = {
        Target.NOWHERE: "left out",
        Target.FIRST_MESSAGE: "first message",
        Target.LAST_MESSAGE: "last message",
    }

    assert rows[: len(RULES)] == [(name, places[rule.target]) for name, rule in RULES.items()]


STABLE = "You are an agent who answers questions about lamps and violins in a few words. " * 3


def ask(path: str, system: str, *turns: str, **fields: Any) -> dict[str, Any]:
    """A request with a system prompt; turns are of the user and the assistant."""
    messages: list[dict[str, Any]] = [
        {"role": ("user", "assistant")[place % 2], "content": text}
        for place, text in enumerate(turns)
    ]
    if path == MESSAGES:
        return body(path, messages, system=system, **fields)
    if path == RESPONSES:
        return body(path, messages, instructions=system, **fields)
    return body(path, [{"role": "system", "content": system}, *messages], **fields)


def prompt_of(bench: ServerBench) -> str:
    return bench.service.tokenizer.decode(bench.ended[-1].request.prompt.ids, False)


@pytest.mark.parametrize("path", APIS)
def test_another_day_reads_the_same_system_prompt(path: str) -> None:
    """And the next turn of a conversation everything before it: the date stays where it was put."""
    bench = ServerBench(chat_template=TOOL_TEMPLATE, prompt_rules=("env-block", "date-line"))
    days = [f"{SENTENCE}{ENV.replace('05', day)}\n{STABLE}" for day in ("05", "06")]

    async def main() -> list[Answer]:
        async with bench.running():
            requests = [
                ask(path, days[0], "Who?"),
                ask(path, days[1], "Where is it?"),
                ask(path, days[1], "Where is it?", "In the attic.", "Why?"),
            ]
            return [await bench.post(path, request) for request in requests]

    first, other, later = run(main())

    num_system = len(bench.service.tokenizer.encode(STABLE))
    assert cache_of(first)["read"] == 0
    assert cache_of(other)["read"] >= num_system // 16 * 16
    assert cache_of(later)["read"] >= len(bench.ended[1].request.prompt.ids) // 16 * 16
    prompt = prompt_of(bench)
    assert prompt.count("Working directory: /home/a") == 1
    assert prompt.index("Working directory") > prompt.index("violins")
    assert "</env>\n\nWhere is it?" in prompt
    [rule] = cache_of(later)["rules"]
    origin = {MESSAGES: "system", RESPONSES: "instructions"}.get(path, "messages[0].content")
    assert rule["rule"] == "env-block"
    assert rule["from"] == origin
    assert rule["characters"] == len(SENTENCE + ENV)


def test_a_clock_goes_behind_the_last_message() -> None:
    """Of the user, or a result in a loop of tools: the history before it is read."""
    bench = ServerBench(chat_template=TOOL_TEMPLATE, prompt_rules=("clock-line",))
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    loop: list[dict[str, Any]] = [
        {"role": "user", "content": "How is the weather? " * 8},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "Sunny."},
    ]

    def at(minute: int, num_messages: int) -> dict[str, Any]:
        system = {"role": "system", "content": f"Current time: 15:0{minute}\n{STABLE}"}
        return body(CHAT, [system, *loop[:num_messages]], tools=[NESTED])

    async def main() -> list[Answer]:
        async with bench.running():
            return [await bench.post(CHAT, at(minute, 1 + 2 * minute)) for minute in (0, 1)]

    first, second = run(main())

    assert cache_of(second)["read"] >= cache_of(first)["computed"] - 48
    assert "Sunny.\n\nCurrent time: 15:01" in prompt_of(bench)
    assert cache_of(second)["rules"] == [
        {"rule": "clock-line", "from": "messages[0].content", "to": "messages[3]", "characters": 19}
    ]


def test_a_billing_header_is_taken_out_of_messages_always_and_alone() -> None:
    """As Anthropic's servers do, and it is reported; the rest of its block stays. Others need the rule."""
    benches = ServerBench(), ServerBench(prompt_rules=("billing-header",))
    system = f"{BILLING_LINE}\n{STABLE}"

    async def main() -> list[Answer]:
        answers = []
        for bench in benches:
            async with bench.running():
                for path in (MESSAGES, CHAT, OLLAMA):
                    for cch in ("36ee5", "0aaa9"):
                        changed = system.replace("36ee5", cch)
                        answers.append(await bench.post(path, ask(path, changed, f"Who? {path}")))
                    has_header = "billing" in prompt_of(bench)
                    assert has_header == (path != MESSAGES and bench is benches[0])
                    assert "violins" in prompt_of(bench)
        return answers

    answers = run(main())

    reported = [[rule["rule"] for rule in cache_of(answer).get("rules", [])] for answer in answers]
    assert reported == 2 * [["billing-header"]] + 4 * [[]] + 6 * [["billing-header"]]
    assert cache_of(answers[1])["read"] > 0.8 * cache_of(answers[0])["computed"]
    assert cache_of(answers[3])["read"] < 0.5 * cache_of(answers[2])["computed"]


def test_without_a_message_for_it_text_stays() -> None:
    """And of a block that is nothing else, the breakpoint stays."""
    bench = ServerBench(prompt_rules=tuple(RULES))
    blocks = [
        {"type": "text", "text": STABLE},
        {"type": "text", "text": "Today is 2026-06-05", "cache_control": {"type": "ephemeral"}},
    ]

    async def main() -> list[Answer]:
        async with bench.running():
            system = [{"role": "system", "content": "Today is 2026-06-05\nBe brief."}]
            question = [{"role": "user", "content": "Who?"}]
            alone = await bench.post(CHAT, body(CHAT, system))
            marked = await bench.post(MESSAGES, body(MESSAGES, question, system=blocks))
            [pin] = await bench.llm.cache.pins()
            assert len(pin.key) > 48
            report = await bench.post("/v1/cache/explain", body(CHAT, [*system, *question]))
            return [alone, marked, report]

    alone, marked, report = run(main())

    assert "rules" not in cache_of(alone)
    assert [rule["from"] for rule in cache_of(marked)["rules"]] == ["system[1]"]
    assert [rule["to"] for rule in report.json["rules"]] == ["messages[1]"]
    paths = [segment["path"] for segment in report.json["segments"]]
    assert "messages[1].moved:messages[0].content" in paths


def test_a_named_prefix_and_its_text_inlined_follow_the_same_rules() -> None:
    """The same tokens; a client may repeat the system prompt with another billing header."""
    rules = ("billing-header", "date-line")
    benches = [ServerBench(prompt_rules=rules) for _ in range(2)]
    system = f"{BILLING_LINE}\nToday is 2026-06-05\n{STABLE}"

    async def main() -> Answer:
        async with benches[0].running(), benches[1].running():
            definition = {"name": "desk", "messages": [{"role": "system", "content": system}]}
            await benches[0].post("/v1/prefixes", definition)
            repeated = system.replace("36ee5", "0aaa9")
            answer = await benches[0].post(CHAT, ask(CHAT, repeated, "Who?", prefix="desk"))
            await benches[1].post(CHAT, ask(CHAT, system, "Who?"))
            return answer

    answer = run(main())

    prompts = [bench.ended[-1].request.prompt.ids for bench in benches]
    assert prompts[0] == prompts[1]
    assert cache_of(answer)["prefix"]["read"] >= cache_of(answer)["prefix"]["tokens"] // 16 * 16
    assert "x-ramify-warning" not in answer.headers
