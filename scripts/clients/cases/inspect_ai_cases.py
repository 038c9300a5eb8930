"""Inspect: a task with a tool, by three of its providers."""

from __future__ import annotations

import os

from inspect_ai import Task, eval_set  # noqa: F401
from inspect_ai import eval as run_eval
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool
from report import KEY, MODEL, SCRATCH, SCRIPTED_URL, case

os.environ |= {
    "OPENAI_BASE_URL": f"{SCRIPTED_URL}/v1", "OPENAI_API_KEY": KEY,
    "VLLM_BASE_URL": f"{SCRIPTED_URL}/v1", "VLLM_API_KEY": KEY,
    "ANTHROPIC_BASE_URL": SCRIPTED_URL, "ANTHROPIC_API_KEY": KEY,
}  # fmt: skip


@tool
def weather():
    """A tool of inspect."""

    async def execute(city: str) -> str:
        """The weather of a city.

        Args:
            city: its name.
        """
        return f"22 degrees in {city}"

    return execute


for provider in ("openai", "vllm", "anthropic"):

    @case(f"{provider}: a task with a tool")
    def _(provider: str = provider) -> str:
        task = Task(
            dataset=[Sample("Weather in Rome?", target="22 degrees in Rome")],
            solver=[use_tools(weather()), generate()],
            scorer=includes(),
        )
        model = get_model(f"{provider}/{MODEL}")
        (log,) = run_eval(task, model=model, display="none", log_dir=SCRATCH, max_tokens=300)
        assert log.status == "success", log.error
        value = log.results.scores[0].metrics["accuracy"].value
        assert value == 1.0, log.samples[0].output.completion
        return f"accuracy {value}"
