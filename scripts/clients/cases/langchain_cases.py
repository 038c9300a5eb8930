"""LangChain over both APIs: answers, streams, tools, structured output."""

from __future__ import annotations

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from report import KEY, MODEL, SCRIPTED_URL, URL, case


class Answer(BaseModel):
    """A structured answer."""

    city: str
    people: list[str]


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"22 degrees in {city}"


def chat(kind: str, url: str):
    """A chat model of LangChain."""
    if kind == "openai":
        return ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key=KEY, max_tokens=300)
    return ChatAnthropic(model=MODEL, base_url=url, api_key=KEY, max_tokens=300)


for kind in ("openai", "anthropic"):

    @case(f"{kind}: invoke, stream, batch")
    def _(kind: str = kind) -> str:
        model = chat(kind, SCRIPTED_URL)
        message = model.invoke("Who?")
        assert message.usage_metadata["input_tokens"] > 0
        assert "".join(str(piece.text) for piece in model.stream("Who?"))
        assert len(chat(kind, URL).bind(max_tokens=8).batch(["Who?", "Where?"])) == 2
        return str(message.content)

    @case(f"{kind}: tool loop")
    def _(kind: str = kind) -> str:
        model = chat(kind, SCRIPTED_URL).bind_tools([weather])
        messages = [HumanMessage("Weather in Rome?")]
        message = model.invoke(messages)
        call = message.tool_calls[0]
        result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
        final = model.invoke([*messages, message, result])
        assert "22 degrees" in str(final.text), final
        return str(final.text)

    @case(f"{kind}: with_structured_output")
    def _(kind: str = kind) -> str:
        answer = chat(kind, SCRIPTED_URL).with_structured_output(Answer).invoke("Who lives there?")
        assert isinstance(answer, Answer)
        return str(answer)
