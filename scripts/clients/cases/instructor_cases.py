"""Instructor in its modes for both APIs: flat, nested and iterable models."""

from __future__ import annotations

import anthropic
import instructor
import openai
from pydantic import BaseModel
from report import KEY, MODEL, SCRIPTED_URL, case


class Person(BaseModel):
    """A person."""

    name: str
    age: int


class Team(BaseModel):
    """A nested model."""

    title: str
    lead: Person
    members: list[Person]


QUESTION = [{"role": "user", "content": "Who is in the team?"}]
# Those in which a server has a part. `MD_JSON` and `ANTHROPIC_JSON` only ask for JSON in the prompt,
# which says nothing about a server whose answers are scripted.
OPENAI_MODES = (
    "TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "JSON_O1", "PARALLEL_TOOLS", "RESPONSES_TOOLS",
)  # fmt: skip
ANTHROPIC_MODES = ("ANTHROPIC_TOOLS", "ANTHROPIC_REASONING_TOOLS")

for mode_name in OPENAI_MODES:
    mode = getattr(instructor.Mode, mode_name, None)
    if mode is None:
        continue

    @case(f"openai, {mode_name}")
    def _(mode: object = mode, mode_name: str = mode_name) -> str:
        plain = openai.OpenAI(base_url=f"{SCRIPTED_URL}/v1", api_key=KEY, max_retries=0)
        client = instructor.from_openai(plain, mode=mode)
        if mode_name == "PARALLEL_TOOLS":
            from collections.abc import Iterable

            people = client.chat.completions.create(
                model=MODEL, messages=QUESTION, max_tokens=400, response_model=Iterable[Person]
            )
            return str(list(people))
        team = client.chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=400, response_model=Team, max_retries=1
        )
        assert team.lead.name
        if mode_name != "JSON":
            people = client.chat.completions.create_iterable(
                model=MODEL, messages=QUESTION, max_tokens=400, response_model=Person
            )
            assert next(iter(people)).name
        return str(team)


for mode_name in ANTHROPIC_MODES:
    mode = getattr(instructor.Mode, mode_name)

    @case(f"anthropic, {mode_name}")
    def _(mode: object = mode) -> str:
        plain = anthropic.Anthropic(base_url=SCRIPTED_URL, api_key=KEY, max_retries=0)
        client = instructor.from_anthropic(plain, mode=mode)
        team = client.messages.create(
            model=MODEL, messages=QUESTION, max_tokens=400, response_model=Team, max_retries=1
        )
        return str(team)
