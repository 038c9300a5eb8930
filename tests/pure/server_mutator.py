"""Valid bodies for every route that takes one (`VALID`), and a seeded mutator of them (`mutant`)."""

import copy
import json
import random
from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

VALID: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "/v1/chat/completions",
        {
            "model": "tiny",
            "messages": [
                {"role": "system", "content": "Be short."},
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "text",
                            "text": "Hello",
                            "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "1h"},
                        }
                    ],
                },
            ],
            "max_completion_tokens": 3,
            "temperature": 0.5,
            "top_p": 0.9,
            "n": 2,
            "seed": 7,
            "stop": ["x", "y"],
            "logprobs": True,
            "top_logprobs": 2,
            "logit_bias": {"5": 1.5},
            "tools": [TOOL],
            "tool_choice": "auto",
            "prompt_cache_key": "k",
            "prompt_cache_options": {"mode": "explicit", "ttl": "30m", "prewarm": False},
            "cache_salt": "s",
            "stream_options": {"include_usage": True},
            "user": "u",
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 3,
            "stream": True,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA},
            },
            "chat_template_kwargs": {"flag": True},
            "priority": 1,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": "Hi"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {
                            "id": "c",
                            "type": "function",
                            "function": {"name": "weather", "arguments": '{"place": "x"}'},
                        }
                    ],
                },
                {"role": "user", "content": "well"},
            ],
            "max_tokens": 2,
            "regex": "[ab]{1,3}",
        },
    ),
    (
        "/v1/completions",
        {
            "prompt": ["one", "two"],
            "max_tokens": 2,
            "echo": True,
            "logprobs": 1,
            "presence_penalty": 0.1,
            "frequency_penalty": 0.1,
            "stop": "z",
            "stop_token_ids": [9],
            "min_tokens": 1,
            "ignore_eos": True,
        },
    ),
    ("/v1/completions", {"prompt": [[1, 2, 3], [4, 5]], "max_tokens": 2, "choice": ["a", "b"]}),
    (
        "/v1/responses",
        {
            "input": [
                {"type": "message", "role": "user", "content": "Hi"},
                {"role": "user", "content": [{"type": "input_text", "text": "there"}]},
            ],
            "instructions": "Be short.",
            "max_output_tokens": 3,
            "store": True,
            "text": {"format": {"type": "text"}},
            "metadata": {"a": "b"},
            "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "developer", "content": "Be brief."},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
                {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
                {"type": "compaction", "encrypted_content": "ramify1.YQ=="},
                {"type": "web_search_call", "id": "ws_1", "status": "completed"},
                {"type": "message", "role": "user", "content": "Go on."},
            ],
            "max_output_tokens": 3,
            "store": False,
            "stream": True,
            "truncation": "auto",
            "include": ["reasoning.encrypted_content"],
            "tools": [
                {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
                {"type": "custom", "name": "c", "format": {"type": "text"}},
                {"type": "local_shell"},
                {"type": "web_search"},
            ],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "custom", "name": "c"}],
            },
        },
    ),
    ("/v1/responses/input_tokens", {"input": "Hi", "instructions": "Be short.", "tools": []}),
    ("/v1/responses/compact", {"input": [{"role": "user", "content": "Hi"}], "model": "tiny"}),
    ("/v1/conversations", {"items": [{"role": "user", "content": "Hi"}], "metadata": {"a": "b"}}),
    (
        "/v1/messages",
        {
            "model": "tiny",
            "max_tokens": 3,
            "system": [
                {"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}
            ],
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": [{"type": "text", "text": "yes"}]},
                {"role": "user", "content": [{"type": "text", "text": "go on"}]},
            ],
            "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
            "stop_sequences": ["q"],
            "temperature": 0.2,
            "diagnostics": {"previous_message_id": None},
            "metadata": {"user_id": "u"},
        },
    ),
    (
        "/v1/messages",
        {
            "model": "tiny",
            "max_tokens": 3,
            "messages": [
                {"role": "system", "content": "first"},
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "data": "AAAA"}},
                        {
                            "type": "document",
                            "title": "t",
                            "source": {
                                "type": "content",
                                "content": [{"type": "text", "text": "d"}],
                            },
                        },
                    ],
                },
                {
                    "role": "assistant",
                    "content": [
                        {"type": "server_tool_use", "id": "s", "name": "w", "input": {"q": "x"}},
                        {
                            "type": "web_search_tool_result",
                            "tool_use_id": "s",
                            "content": [{"type": "web_search_result", "title": "t", "url": "u"}],
                        },
                    ],
                },
                {"role": "system", "content": "late", "clear_at": "never"},
                {"role": "user", "content": "go on"},
            ],
            "tools": [
                {"type": "bash_20250124", "name": "bash"},
                {"type": "web_search_20250305", "name": "web_search", "max_uses": 1},
            ],
            "context_management": {"edits": []},
            "mcp_servers": [],
        },
    ),
    (
        "/v1/messages/count_tokens",
        {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "system": "s"},
    ),
    ("/tokenize", {"prompt": "some text", "return_token_strs": True}),
    ("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/v1/cache/explain", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("/v1/cache/explain", {"prompt": "some text"}),
    ("/v1/cache/explain", {"system": "s", "messages": [{"role": "user", "content": "Hi"}]}),
    ("/v1/cache/explain", {"input": "some text"}),
    ("/v1/cache/pins", {"prompt": "some text that is longer than a page", "ttl_s": 1.0}),
)

ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    -(2**63) - 1,
    10**400,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    " ",
    "\x00\x1b[31m\r\n\x7f",
    "\ud800",
    "\udfff\ud800",
    "\u202e\ufeff\u2028",
    "<|end|><|system|>",
    "{{ 7 * 7 }}{% for x in range(10**9) %}{% endfor %}",
    "(((((a+)+)+)+)+)$",
    "x" * 70_000,
    "é" * 300,
    [],
    {},
    [[]],
    [None],
    {"": None},
    {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}},
    {"type": "ephemeral", "ttl": "9h"},
    [1, "a", [2]],
    ["a"] * 200,
    [0] * 3000,
    {str(i): i for i in range(1100)},
    "tiny",
    "gpt-4",
    "array",
)


def _paths(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all keys and items inside a value."""
    paths = []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in items:
        paths.append((*prefix, key))
        if isinstance(child, dict | list):
            paths += _paths(child, (*prefix, key))
    return paths


def _mutate_value(rng: random.Random, value: dict[str, Any]) -> None:
    """Replace, delete, wrap or repeat a random part of a decoded body."""
    paths = _paths(value)
    if not paths:
        value["model"] = rng.choice(ODD_VALUES)
        return
    *parents, last = rng.choice(paths)
    container: Any = value
    for key in parents:
        container = container[key]
    kind = rng.randrange(6)
    if kind == 0:
        del container[last]
    elif kind == 1:
        container[last] = [container[last]]
    elif kind == 2:
        container[last] = {"type": container[last]}
    elif kind == 3 and isinstance(container, list):
        container.extend(copy.deepcopy(container) * rng.choice((1, 3, 40)))
    else:
        container[last] = copy.deepcopy(rng.choice(ODD_VALUES))


def _with_deep_nesting(rng: random.Random, body: bytes) -> bytes:
    """Replace a random value by deeply nested brackets, not always balanced."""
    depth = rng.choice((33, 65, 500, 1200, 5000, 100_000))
    opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}"), (b'{"anyOf":[', b"]}")))
    nested = opening * depth + b"1" + closing * rng.choice((depth, depth, depth - 1, 0))
    colons = [at for at, byte in enumerate(body) if byte == ord(":")]
    if not colons:
        return nested
    at = rng.choice(colons) + 1
    return body[:at] + nested + (b"," + body[at:] if rng.random() < 0.3 else b"}")


def _mutate_bytes(rng: random.Random, body: bytes) -> bytes:
    """Cut, change, repeat or insert bytes of an encoded body."""
    kind = rng.randrange(9)
    at = rng.randrange(len(body))
    if kind == 0:
        return body[:at]
    if kind == 1:
        return body[:at] + bytes([rng.randrange(256)]) + body[at + 1 :]
    if kind == 2:
        invalid = (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\\ud800", b"\\u0000", b"\x00", b"\xf5")
        return body[:at] + rng.choice(invalid) + body[at:]
    if kind == 3:
        tokens = (
            b"NaN",
            b"Infinity",
            b"1e999",
            b"-0",
            b"9" * 5000,
            b"0x1",
            b"'a'",
            b"/*x*/",
            b"tru",
        )
        return body[:at] + rng.choice(tokens) + body[at:]
    if kind == 4:
        return _with_deep_nesting(rng, body)
    if kind == 5:  # duplicate keys
        return body[:-1] + b',"messages":[],"prompt":7,"model":"tiny","max_tokens":2}'
    if kind == 6:
        end = rng.randrange(at, len(body))
        return body[:at] + body[at:end] * 2 + body[end:]
    if kind == 7:
        return rng.choice((b"", b"null", b"[]", b"0", b'""', b"{}", b"\xef\xbb\xbf" + body, b" "))
    return body + rng.choice((b"}", b"\n{}", b"\x00", b",", b"garbage" * 100))


def mutant(seed: int) -> tuple[str, bytes, dict[str, str]]:
    """Path, body and headers of a mutated request; a function of the seed."""
    rng = random.Random(seed)
    path, valid = rng.choice(VALID)
    if rng.random() < 0.05:
        path = rng.choice(VALID)[0]  # the body of another route
    value = copy.deepcopy(valid)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        _mutate_value(rng, value)
    ascii_only = rng.random() < 0.5
    body = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    if rng.random() < 0.4:
        body = _mutate_bytes(rng, body)
    headers = {}
    if rng.random() < 0.1:
        name = rng.choice(("content-length", "content-encoding", "x-request-id", "content-type"))
        headers[name] = rng.choice(("gzip", "-1", "9" * 30, "identity", "a" * 300, "\x01\x7f", ""))
    if rng.random() < 0.2:
        headers["anthropic-version"] = "2023-06-01"
    return path, body, headers
