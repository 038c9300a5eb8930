"""LiteLLM by three providers, and the error that its users catch."""

from __future__ import annotations

import litellm
from report import KEY, MODEL, SCRIPTED_URL, URL, case

HELLO = [{"role": "user", "content": "Who has lamps?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
PROVIDERS = {
    "openai": {"api_base": "{}/v1"},
    "hosted_vllm": {"api_base": "{}/v1"},
    "anthropic": {"api_base": "{}"},
}


def options(provider: str, url: str) -> dict[str, str]:
    """Keyword arguments of `completion` for a provider."""
    base = PROVIDERS[provider]["api_base"].format(url)
    return {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": KEY}


for name in PROVIDERS:

    @case(f"{name}: answer, stream, tool call")
    def _(name: str = name) -> str:
        answer = litellm.completion(messages=HELLO, max_tokens=8, **options(name, URL))
        assert answer.usage.prompt_tokens > 0
        chunks = list(
            litellm.completion(messages=HELLO, max_tokens=8, stream=True, **options(name, URL))
        )
        assert chunks
        call = litellm.completion(
            messages=HELLO, max_tokens=300, tools=[TOOL], **options(name, SCRIPTED_URL)
        )
        tool_call = call.choices[0].message.tool_calls[0]
        assert tool_call.function.name == "weather"
        return f"{len(chunks)} chunks, {tool_call.function.arguments}"

    @case(f"{name}: ContextWindowExceededError")
    def _(name: str = name) -> str:
        long = [{"role": "user", "content": "a b " * 40_000}]
        try:
            litellm.completion(messages=long, max_tokens=8, **options(name, URL))
        except litellm.ContextWindowExceededError as error:
            return str(error)[:120]
        raise AssertionError("a prompt that is too long was answered")
