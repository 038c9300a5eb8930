"""LlamaIndex: completion, chat, streams, structured and nested output, tools."""

from __future__ import annotations

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from report import KEY, MODEL, SCRIPTED_URL, URL, case


class Person(BaseModel):
    """A person."""

    name: str
    age: int


class Family(BaseModel):
    """Persons of one name."""

    surname: str
    members: list[Person]


def model(url: str, **options: object) -> OpenAILike:
    """An OpenAI-like model that may call functions."""
    return OpenAILike(
        model=MODEL, api_base=f"{url}/v1", api_key=KEY, is_chat_model=True,
        is_function_calling_model=True, max_tokens=300, context_window=4096, **options,
    )  # fmt: skip


@case("complete, chat, stream_chat")
def _() -> str:
    text = model(SCRIPTED_URL).complete("Who?").text
    answer = model(SCRIPTED_URL).chat([ChatMessage(role="user", content="Who?")])
    pieces = [str(piece.delta) for piece in model(URL).stream_chat([ChatMessage("Who?")])]
    assert text
    assert pieces
    return str(answer.message.content)


@case("structured, nested, by a tool")
def _() -> str:
    family = model(SCRIPTED_URL).as_structured_llm(Family).complete("Who lives there?").raw
    assert isinstance(family, Family)
    assert family.members[0].age >= 0
    return str(family)


@case("structured, nested, by a response format")
def _() -> str:
    structured = model(SCRIPTED_URL, should_use_structured_outputs=True).as_structured_llm(Family)
    family = structured.complete("Who lives there?").raw
    assert isinstance(family, Family)
    return str(family)


@case("predict_and_call with a tool")
def _() -> str:
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"22 degrees in {city}"

    answer = model(SCRIPTED_URL).predict_and_call(
        [FunctionTool.from_defaults(weather)], user_msg="Weather in Rome?"
    )
    assert "22 degrees in Rome" in str(answer)
    return str(answer)
