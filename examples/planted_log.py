"""Writes `agents.jsonl.gz`, a log of three applications that lose cache hits for known reasons.

    python examples/planted_log.py examples/agents.jsonl.gz
    python examples/planted_log.py mended.jsonl.gz --mended

Rows have an OpenAI chat body, a time, a session and the usage of the answer. The usage comes from a
small model of a cache: a prompt reads the longest prefix that it shares with an earlier prompt of the
last ten minutes, in steps of 128 tokens from 1,024 on.

- `support` writes the time to the second into the first line of its system prompt.
- `review` gets its tools from a map, whose order changes now and then.
- `search` does everything right, but people pause for a long time in some of its conversations.

With `--mended` the time stands at the end of each user's message, and the tools keep their order.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

SEED = 32
START = datetime(2026, 11, 2, 9, 0, tzinfo=UTC)
LIFETIME = timedelta(minutes=10)
CHARS_PER_TOKEN = 4
MIN_TOKENS, STEP_TOKENS = 1024, 128
WORDS = (
    "account address agent answer branch button change claim client code commit contract customer "
    "data delay delivery document error event file form invoice item law letter limit line list "
    "merge module money month name note number offer office order page parcel part payment person "
    "plan policy price problem product question reason record refund region repair report request "
    "result return review rule sale service ship size state step stock store street table task tax "
    "team term test ticket time total track type user value version visit week word year"
).split()

Body = dict[str, Any]
Sent = tuple[datetime, str, Body]  # time, session, body


def text(source: random.Random, num_words: int) -> str:
    """Sentences of random words."""
    words = [source.choice(WORDS) for _ in range(num_words)]
    return " ".join(
        " ".join(words[at : at + 12]).capitalize() + "." for at in range(0, num_words, 12)
    )


def tools(source: random.Random, names: list[str]) -> list[Body]:
    """Definitions of tools."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": text(source, 60),
                "parameters": {
                    "type": "object",
                    "properties": {
                        word: {"type": "string", "description": text(source, 12)}
                        for word in source.sample(WORDS, 3)
                    },
                },
            },
        }
        for name in names
    ]


def turns(source: random.Random, system: str, ends: Sequence[str]) -> Iterator[list[Body]]:
    """The messages of each request of a conversation; a user's message ends with its text."""
    messages: list[Body] = [{"role": "system", "content": system}]
    for end in ends:
        messages.append({"role": "user", "content": text(source, source.randint(20, 60)) + end})
        yield [dict(message) for message in messages]
        messages.append({"role": "assistant", "content": text(source, source.randint(40, 120))})


def support(source: random.Random, *, is_mended: bool) -> Iterator[Sent]:
    """A clock in the system prompt; mended, at the end of each user's message."""
    policy = "You answer customers.\n" + text(source, 900)
    for number in range(10):
        waits = itertools.accumulate(source.randint(20, 70) for _ in range(5))
        times = [START + timedelta(minutes=7 * number, seconds=wait) for wait in waits]
        clocks = [f"Current time: {when:%Y-%m-%d %H:%M:%S}" for when in times]
        ends = [f"\n{clock}" if is_mended else "" for clock in clocks]
        for at, messages in enumerate(turns(source, policy, ends)):
            if not is_mended:
                messages[0]["content"] = f"{clocks[at]}\n{policy}"
            yield (
                times[at],
                f"support-{number}",
                {"model": "gpt-4o", "messages": messages},
            )


def review(source: random.Random, *, is_mended: bool) -> Iterator[Sent]:
    """Tools whose order changes in one of three requests."""
    names = (
        "read_file write_file list_files search_code run_tests show_diff comment approve".split()
    )
    defined = tools(source, names)
    rules = "You review changes of code.\n" + text(source, 500)
    for number in range(8):
        when = START + timedelta(minutes=3 + 9 * number)
        for messages in turns(source, rules, [""] * 6):
            when += timedelta(seconds=source.randint(8, 40))
            sent = list(defined)
            if source.random() < 1 / 3:
                source.shuffle(sent)
            if is_mended:
                sent.sort(key=lambda tool: str(tool["function"]["name"]))
            body = {"model": "gpt-4o", "tools": sent, "messages": messages}
            yield when, f"review-{number}", body


def search(source: random.Random) -> Iterator[Sent]:
    """A clean prompt; every second conversation pauses for 40 minutes."""
    for number in range(6):
        own = f"You search the documents of client {number}.\n" + text(source, 1100)
        when = START + timedelta(minutes=5 + 11 * number)
        for turn, messages in enumerate(turns(source, own, [""] * 5)):
            when += timedelta(minutes=40 if turn == 3 and number % 2 else 1)
            yield when, f"search-{number}", {"model": "gpt-4o", "messages": messages}


def rendered(body: Body) -> str:
    """The prompt as a text."""
    return json.dumps([body.get("tools", []), body["messages"]])


def shared(a: str, b: str) -> int:
    """Length of the common prefix."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle - 1)
    return low


def with_usage(requests: list[Sent], source: random.Random) -> Iterator[Body]:
    """Rows of the log, in the order of time."""
    earlier: list[tuple[datetime, str]] = []
    for number, (when, session, body) in enumerate(sorted(requests, key=lambda sent: sent[0])):
        prompt = rendered(body)
        alive = [old for at, old in earlier if when - at <= LIFETIME]
        most = max((shared(prompt, old) for old in alive), default=0) // CHARS_PER_TOKEN
        read = most // STEP_TOKENS * STEP_TOKENS if most >= MIN_TOKENS else 0
        earlier.append((when, prompt))
        output = source.randint(60, 160)
        num_input = len(prompt) // CHARS_PER_TOKEN
        usage = {
            "prompt_tokens": num_input,
            "completion_tokens": output,
            "total_tokens": num_input + output,
            "prompt_tokens_details": {"cached_tokens": read},
        }
        yield {
            "timestamp": when.isoformat(),
            "session_id": session,
            "request": body,
            "response": {
                "id": f"chatcmpl-{number}",
                "model": body["model"],
                "usage": usage,
            },
        }


def main() -> None:
    """Write the log to the file that the command line names."""
    source = random.Random(SEED)  # noqa: S311 - a log, not a secret
    mended = "--mended" in sys.argv[2:]
    requests = [
        *support(source, is_mended=mended),
        *review(source, is_mended=mended),
        *search(source),
    ]
    lines = [json.dumps(row) + "\n" for row in with_usage(requests, source)]
    packed = gzip.compress("".join(lines).encode(), mtime=0)  # the same bytes each time
    Path(sys.argv[1]).write_bytes(packed)


if __name__ == "__main__":
    main()
