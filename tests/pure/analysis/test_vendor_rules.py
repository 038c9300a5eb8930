"""Predicted reads and writes equal a second implementation of each vendor's rule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.analysis.corpus import Corpus
from ramify.analysis.providers import CacheModel, load_rules, prompts_of
from ramify.analysis.reader import Row
from ramify.analysis.readers.bodies.request_bodies import logged_request, parse_bodies
from ramify.analysis.records import SegmentKind
from tests.budget import examples
from tests.pure.analysis import planted_prompts as prompts
from tests.pure.analysis.planted_bodies import Body, anthropic_body, chat_body
from tests.pure.analysis.planted_prompts import Message, Part, Prompt
from tests.pure.analysis.vendor_oracles import ORACLES, Bill, Call


@dataclass(frozen=True)
class Step:
    """A request of a random log: whose, and how it differs from the conversation's next prompt."""

    talk: int
    kind: str  # next, again, edit, cut
    gap_s: float
    wait_s: float
    answer_s: float
    choice: str | None
    image: bool
    marks: tuple[str, ...]
    ttl: str | None


STEPS = st.builds(
    Step,
    talk=st.integers(0, 2),
    kind=st.sampled_from(["next", "next", "next", "again", "edit", "cut"]),
    gap_s=st.sampled_from([0.0, 0.0, 1.0, 30.0, 200.0, 299.0, 301.0, 599.0, 700.0, 1799.0, 4000.0]),
    wait_s=st.sampled_from([0.0, 0.5, 1.0, 40.0, 400.0]),
    answer_s=st.sampled_from([0.0, 2.0, 100.0]),
    choice=st.sampled_from([None, None, None, "any"]),
    image=st.sampled_from([False, False, False, True]),
    marks=st.sampled_from(
        [(), ("last",), ("system", "last"), ("tools", "system", "last"), ("0", "last"), ("2", "4")]
    ),
    ttl=st.sampled_from([None, None, "1h"]),
)


def prompts_of_steps(seed: int, steps: list[Step], model: str) -> list[Prompt]:
    """Conversations of one app with tools, turn by turn; edits, retries and cuts between."""
    rng = Random(seed)
    kind = rng.choice(["agent", "agent", "chat"])
    sizes = [2500, 9000, 24_000] if "haiku" in model else [200, 2500, 9000]  # about its minimum
    app = prompts.make_app(rng, kind, model, system_chars=rng.choice(sizes))
    talks = [prompts.conversation(rng, app, 24) for _ in range(3)]
    turns = [0, 0, 0]
    out = []
    for step in steps:
        prompt = talks[step.talk][min(turns[step.talk], 23)]
        if step.kind == "next":
            turns[step.talk] += rng.choice([1, 1, 1, 5])  # a gap: some turns are not logged
        elif step.kind == "edit":
            at = rng.randrange(len(prompt.messages))
            messages = list(prompt.messages)
            parts = (replace(messages[at].parts[0], text="Edited. " * 9), *messages[at].parts[1:])
            if messages[at].parts[0].kind in {"text", "result"}:
                messages[at] = replace(messages[at], parts=parts)
            prompt = replace(prompt, messages=tuple(messages))
        elif step.kind == "cut":
            users = [at for at, message in enumerate(prompt.messages) if message.role == "user"]
            prompt = replace(prompt, messages=prompt.messages[: rng.choice(users) + 1])
        if step.image:
            prompt = replace(
                prompt,
                messages=(
                    *prompt.messages,
                    Message("user", (Part("text", "See."), Part("image", "QUJD"))),
                ),
            )
        out.append(replace(prompt, marks=step.marks, ttl=step.ttl))
    return out


def body_of(provider: str, prompt: Prompt, step: Step) -> Body:
    """A body for a provider."""
    if provider == "anthropic":
        body = anthropic_body(prompt)
        return body if step.choice is None else body | {"tool_choice": {"type": step.choice}}
    body = chat_body(prompt)
    return body if step.choice is None else body | {"reasoning_effort": "high"}


@pytest.mark.parametrize(("provider", "model"), list(ORACLES))
@given(seed=st.integers(0, 10**6), steps=st.lists(STEPS, min_size=2, max_size=16))
@settings(max_examples=examples(40), deadline=None)
def test_predictions_equal_the_second_implementation(
    provider: str, model: str, seed: int, steps: list[Step]
) -> None:
    """Reads and writes agree on conversations with tools, edits, gaps and parallel requests."""
    corpus, oracle, now = Corpus(), ORACLES[provider, model](), 0.0
    expected: list[Bill] = []
    for number, (prompt, step) in enumerate(
        zip(prompts_of_steps(seed, steps, model), steps, strict=True)
    ):
        body = body_of(provider, prompt, step)
        (fields,) = parse_bodies(body)
        now += step.gap_s
        ready = now + step.wait_s
        answer = (
            parse_bodies(chat_body(replace(prompt, messages=(prompts.assistant("An answer."),))))[0]
        ).segments[-1:]
        stored = corpus.add(
            replace(
                logged_request(
                    Row("log", number + 1, None), fields,
                    start_s=now, first_output_s=ready, end_s=ready + step.answer_s,
                ),
                output=answer,
            )
        )  # fmt: skip
        tokens = {
            path: tuple(corpus.tokens(int(unit)).tolist())
            for path, unit in zip(stored.paths, stored.units, strict=True)
            if corpus.units[int(unit)].kind is not SegmentKind.SETTING
        }
        said = tuple(corpus.tokens(corpus.unit_of(answer[0])).tolist())
        expected.append(oracle.ask(Call(body, tokens, now, ready, ready + step.answer_s, said)))

    predicted = CacheModel(corpus, provider, load_rules(None)).replay(prompts_of(corpus))

    billed = [item.billed for item in predicted]
    assert [
        Bill(item.num_read, item.num_written, item.num_written_1h) for item in billed
    ] == expected
