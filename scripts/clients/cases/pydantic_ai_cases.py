"""Pydantic AI over chat completions, responses and messages: tools and typed outputs."""

from __future__ import annotations

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from report import KEY, MODEL, SCRIPTED_URL, case


class Person(BaseModel):
    """A person with friends."""

    name: str
    friends: list[str]


provider = OpenAIProvider(base_url=f"{SCRIPTED_URL}/v1", api_key=KEY)
MODELS = {
    "chat": OpenAIChatModel(MODEL, provider=provider),
    "responses": OpenAIResponsesModel(MODEL, provider=provider),
    "anthropic": AnthropicModel(
        MODEL, provider=AnthropicProvider(base_url=SCRIPTED_URL, api_key=KEY)
    ),
}

for name, model in MODELS.items():

    @case(f"{name}: text and tool loop")
    def _(model: object = model) -> str:
        agent = Agent(model, model_settings={"max_tokens": 300})

        @agent.tool_plain
        def weather(city: str) -> str:
            """The weather of a city."""
            return f"22 degrees in {city}"

        result = agent.run_sync("Weather in Rome?")
        assert "22 degrees in Rome" in result.output, result.output
        return result.output

    @case(f"{name}: output by a tool")
    def _(model: object = model) -> str:
        agent = Agent(model, output_type=ToolOutput(Person), model_settings={"max_tokens": 300})
        return str(agent.run_sync("Who?").output.friends)

    if name != "anthropic":

        @case(f"{name}: native output")
        def _(model: object = model) -> str:
            agent = Agent(
                model, output_type=NativeOutput(Person), model_settings={"max_tokens": 300}
            )
            return str(agent.run_sync("Who?").output.friends)
