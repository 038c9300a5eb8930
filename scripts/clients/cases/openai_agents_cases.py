"""OpenAI's Agents SDK over responses and chat completions: tools with `output_type`, hand-offs."""

from __future__ import annotations

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from report import KEY, MODEL, SCRIPTED_URL, case

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{SCRIPTED_URL}/v1", api_key=KEY, max_retries=0)


class Report(BaseModel):
    """A typed output."""

    city: str
    degrees: int


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"22 degrees in {city}"


for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
    name = kind.__name__

    @case(f"{name}: tool loop")
    def _(kind: type = kind) -> str:
        agent = Agent(
            name="weather", model=kind(MODEL, client), tools=[weather],
            model_settings=ModelSettings(max_tokens=300),
        )  # fmt: skip
        output = Runner.run_sync(agent, "Weather in Rome?").final_output
        assert "22 degrees in Rome" in output
        return output

    @case(f"{name}: output_type")
    def _(kind: type = kind) -> str:
        agent = Agent(name="report", model=kind(MODEL, client), output_type=Report)
        return str(Runner.run_sync(agent, "Weather in Rome?").final_output)

    @case(f"{name}: tools with output_type")
    def _(kind: type = kind) -> str:
        agent = Agent(name="both", model=kind(MODEL, client), tools=[weather], output_type=Report)
        output = Runner.run_sync(agent, "Weather in Rome?").final_output
        assert isinstance(output, Report)
        return str(output)
