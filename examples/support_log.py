"""Write the log of a made-up help desk, whose prompts share less than they could.

    python examples/support_log.py support_log.jsonl
    python examples/support_log.py --mended mended_log.jsonl

A line is a body for OpenAI's chat API with the response beside it. Three habits of the help desk cost
hits: the system prompt begins with the time, the tools come in the order of a set, and a request id
stands above the handbook. `--mended` writes what the same customers get once these three are gone.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODEL = "gpt-4.1"
START = dt.datetime(2026, 11, 20, 9, 0, tzinfo=dt.UTC)
LIFETIME_S = 600.0
MIN_TOKENS, STEP_TOKENS, CHARS_PER_TOKEN = 1024, 128, 4

TOOLS = {
    "find_order": ("Find an order by number or e-mail.", ("order", "email")),
    "track_parcel": ("Where a parcel is, and when it arrives.", ("parcel",)),
    "refund": ("Pay an order back, in part or whole.", ("order", "cents", "reason")),
    "open_ticket": ("Hand a case to a colleague.", ("summary", "priority")),
    "search_handbook": ("Search the handbook.", ("words",)),
    "change_address": ("Change where an order goes.", ("order", "street", "city", "postcode")),
}
SUBJECTS = (
    "orders parcels refunds invoices vouchers returns warranties addresses payments accounts gifts "
    "deliveries complaints repairs sizes subscriptions passwords newsletters holidays stores"
).split()
RULES = (
    "Ask for the number before you look anything up.",
    "Name the article of this handbook that you follow.",
    "Never promise a date that no tool has given you.",
    "Over 200 euros, a colleague decides.",
    "Answer in the language of the customer.",
)
QUESTIONS = (
    "Where is my parcel?",
    "I would like to send back the blue lamp.",
    "The invoice has my old address.",
    "Can I pay in two parts?",
    "My voucher does not work.",
    "The kettle is broken after a week.",
)
FOLLOW_UPS = (
    "The number is {number}.",
    "Thanks. And how long will that take?",
    "That is not what the page says.",
    "Fine, please do that.",
    "One more thing: can you send it to my office?",
)


def handbook() -> str:
    """About 1,500 tokens that are the same for all customers."""
    return "\n".join(
        f"{number}. On {subject}: " + " ".join(RULES[(number + at) % len(RULES)] for at in range(4))
        for number, subject in enumerate(SUBJECTS, 1)
    )


def tool(name: str) -> dict[str, Any]:
    """A tool's definition."""
    about, fields = TOOLS[name]
    properties = {field: {"type": "string"} for field in fields}
    parameters = {"type": "object", "properties": properties, "required": list(fields)}
    return {
        "type": "function",
        "function": {"name": name, "description": about, "parameters": parameters},
    }


def body(
    rng: random.Random, turns: list[tuple[dt.datetime, str]], *, mended: bool
) -> dict[str, Any]:
    """The request of a conversation's newest turn; turns are the customer's and the answers."""
    names = list(TOOLS)
    request_id = f"{rng.getrandbits(48):012x}"
    is_shuffled = rng.random() < 0.3
    shuffled = rng.sample(names, len(names))
    clock = f"It is {turns[-1][0]:%A, %d %B %Y, %H:%M:%S}.\n"
    head = "You are the help desk of a shop for lamps and kettles.\n"
    system = head + handbook()
    if not mended:
        system = f"{clock}{head}Request {request_id}\n{handbook()}"
        names = shuffled if is_shuffled else names
    messages = [{"role": "system", "content": system}]
    for number, (at, text) in enumerate(turns):
        sent = ""
        if mended and not number % 2:  # the time stays in the turn in which it was sent
            sent = f"\n(sent at {at:%A, %d %B %Y, %H:%M:%S})"
        messages.append({"role": "assistant" if number % 2 else "user", "content": text + sent})
    return {"model": MODEL, "tools": [tool(name) for name in names], "messages": messages}


class CacheModel:
    """The vendor's side: prefixes of 128 tokens, at least 1,024, for ten minutes after the last use.

    Texts stand for tokens, 4 characters each.
    """

    def __init__(self) -> None:
        self._used: dict[str, dt.datetime] = {}

    def read(self, prompt: str, at: dt.datetime) -> int:
        """Tokens read for a prompt, which is stored."""
        best = 0
        for size in range(STEP_TOKENS, len(prompt) // CHARS_PER_TOKEN, STEP_TOKENS):
            key = prompt[: size * CHARS_PER_TOKEN]
            before = self._used.get(key)
            if (
                before is not None
                and (at - before).total_seconds() < LIFETIME_S
                and best == size - STEP_TOKENS
            ):
                best = size
            self._used[key] = at
        return best if best >= MIN_TOKENS else 0


def rows(*, mended: bool, seed: int = 1) -> Iterator[dict[str, Any]]:
    """Lines of the log in order of time."""
    rng, cache = random.Random(seed), CacheModel()  # noqa: S311 - the same log each time
    visits = []
    for customer in range(12):
        at = START + dt.timedelta(seconds=rng.randrange(3000))
        turns: list[tuple[dt.datetime, str]] = []
        for turn in range(rng.randint(2, 6)):
            text = FOLLOW_UPS[(turn - 1) % len(FOLLOW_UPS)] if turn else rng.choice(QUESTIONS)
            turns = [*turns, (at, text.format(number=rng.randrange(10_000, 99_999)))]
            visits.append((at, customer, turns))
            answer = f"I have looked at case {rng.randrange(1000)}: it is on its way."
            turns = [*turns, (at, answer)]
            # Most customers answer at once, some after a coffee.
            at += dt.timedelta(seconds=rng.randint(15, 90) if rng.random() < 0.9 else 1500)
    for number, (at, customer, turns) in enumerate(sorted(visits, key=lambda visit: visit[:2])):
        request = body(rng, turns, mended=mended)
        prompt = json.dumps(request["tools"]) + json.dumps(request["messages"])
        num_input = len(prompt) // CHARS_PER_TOKEN
        usage = {
            "prompt_tokens": num_input,
            "completion_tokens": 20,
            "total_tokens": num_input + 20,
            "prompt_tokens_details": {"cached_tokens": cache.read(prompt, at)},
        }
        yield {
            "timestamp": at.isoformat(),
            "latency_ms": 900,
            "session_id": f"customer-{customer}",
            "request": request,
            "response": {
                "id": f"chatcmpl-{number:04d}",
                "object": "chat.completion",
                "model": MODEL,
                "usage": usage,
            },
        }


def main() -> None:
    """Write a log."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--mended", action="store_true", help="without the three habits")
    arguments = parser.parse_args()
    lines = [json.dumps(row) + "\n" for row in rows(mended=arguments.mended)]
    arguments.file.write_text("".join(lines), encoding="utf-8")
    print(f"{arguments.file}: {len(lines)} requests")


if __name__ == "__main__":
    main()
