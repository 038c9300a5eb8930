"""Requests with named prefixes in every API, and with the same parts inlined."""

from typing import Any

from ramify.server.tenants import ApiKeys
from tests.pure.server_bench import Answer, ServerBench

PATH = "/v1/prefixes"
CHAT, RESPONSES, MESSAGES, OLLAMA = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
)
APIS = (CHAT, RESPONSES, MESSAGES, OLLAMA)
SYSTEM = "You answer the questions of people who want to borrow a lamp or a violin. " * 6
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "The weather in a city.", "parameters": PARAMETERS}
NESTED = {"type": "function", "function": FUNCTION}
FLAT = {"type": "function"} | FUNCTION
OF_MESSAGES = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": PARAMETERS,
}
TOOLS = {CHAT: NESTED, RESPONSES: FLAT, MESSAGES: OF_MESSAGES, OLLAMA: NESTED}
EXAMPLES = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Mara."}]
QUESTION = [{"role": "user", "content": "Where is Mara?"}]
KEYS = ApiKeys.of("key-ann", "key-bob", admin="key-admin")
DEFINITIONS: dict[str, dict[str, Any]] = {
    "system": {"system": SYSTEM},
    "system message": {"messages": [{"role": "system", "content": SYSTEM}]},
    "blocks": {
        "system": [
            {"type": "text", "text": SYSTEM},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        ]
    },
    "tools": {"tools": [NESTED]},
    "all": {"system": SYSTEM, "tools": [OF_MESSAGES], "messages": EXAMPLES},
    "document": {"messages": [{"role": "user", "content": SYSTEM}]},
}


def body(path: str, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """A greedy request for 6 tokens."""
    match path:
        case "/v1/responses":
            return {"input": messages, "max_output_tokens": 6, "temperature": 0} | fields
        case "/api/chat":
            greedy = {"options": {"temperature": 0, "num_predict": 6}, "stream": False}
            return {"model": "tiny", "messages": messages} | greedy | fields
        case _:
            request = {"model": "tiny", "messages": messages, "max_tokens": 6, "temperature": 0}
            return request | fields


def inlined(path: str, definition: dict[str, Any]) -> dict[str, Any]:
    """The request with the parts of a prefix in its own fields."""
    messages = [*definition.get("messages", []), *QUESTION]
    fields: dict[str, Any] = {"tools": [TOOLS[path]]} if "tools" in definition else {}
    if (system := definition.get("system")) is not None:
        if not isinstance(system, str):
            system = "\n".join(block["text"] for block in system)
        if path == MESSAGES:
            fields["system"] = system
        else:
            messages.insert(0, {"role": "system", "content": system})
    return body(path, messages, **fields)


def answer_of(answer: Answer) -> object:
    """What the model says."""
    assert answer.status == 200, answer.body
    payload = answer.json
    return (
        payload.get("choices")
        or payload.get("content")
        or payload.get("message")
        or [item["content"] for item in payload["output"] if "content" in item]
    )


def cache_of(answer: Answer) -> dict[str, Any]:
    assert answer.status == 200, answer.body
    payload = answer.json
    return dict(payload.get("ramify_cache") or payload["usage"]["ramify_cache"])


def error_of(answer: Answer) -> tuple[int, str]:
    error = answer.json["error"]
    return answer.status, error if isinstance(error, str) else error["message"]


async def define(bench: ServerBench, key: str | None = None, **fields: Any) -> Answer:
    return await bench.post(PATH, {"name": "desk"} | fields, key)
