"""The scripted model of coding agents: it finds their shell tool and calls it as its schema says."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2 as httpx
import pytest
from clients.agents import AGENTS
from clients.scripted_server import (
    NUM_CALLS,
    AgentScript,
    record_line,
    scripted_service,
    shell_arguments,
    step_result,
)
from starlette.testclient import TestClient

from ramify.server.app import Server
from ramify.server.generation import Generation

TEXT = {"type": "string"}


def tool(name: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize(
    ("field", "schema", "command"),
    [
        ("command", TEXT, "{}"),
        ("cmd", TEXT, "{}"),
        ("command", {"type": "array", "items": TEXT}, ["bash", "-c", "{}"]),
        ("commands", {"type": "array", "items": TEXT}, ["{}"]),
        ("commands", {"anyOf": [{"type": "array", "items": TEXT}, TEXT]}, ["{}"]),
    ],
)
def test_a_shell_tool_is_called_as_its_schema_says(field: str, schema: Any, command: Any) -> None:
    """The command is a text or a list; other required arguments have a value, optional ones none."""
    function = tool("Bash", {field: schema, "why": TEXT, "timeout": TEXT}, [field, "why"])

    arguments = shell_arguments(function["function"], 2)

    script = arguments[field][-1] if isinstance(arguments[field], list) else arguments[field]
    expected = [script if part == "{}" else part for part in command]
    assert arguments[field] == (script if command == "{}" else expected)
    assert set(arguments) == {field, "why"}
    printed = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert printed.stdout == step_result(2) + "\n"


@contextmanager
def agent_server() -> Iterator[tuple[httpx.Client, list[Generation]]]:
    service = scripted_service(AgentScript)
    ended: list[Generation] = []
    service.listeners.append(ended.append)
    with TestClient(Server(service).app(), base_url="http://localhost") as client:
        yield client, ended


def test_the_script_calls_until_all_results_are_there() -> None:
    """An agent that runs what it is told gets `NUM_CALLS` calls, then the last sentence."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Run the steps."}]
    body = {"model": "local", "messages": messages, "tools": [tool("bash", {"command": TEXT}, [])]}
    with agent_server() as (client, ended):
        for _ in range(NUM_CALLS):
            answer = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
            call = answer["tool_calls"][0]
            script = json.loads(call["function"]["arguments"])["command"]
            result = subprocess.run(
                ["sh", "-c", script], capture_output=True, text=True, check=True
            )
            messages += [answer]
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": result.stdout}]
        last = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]

    assert last["content"] == f"Done: {step_result(NUM_CALLS)}."
    assert [f'"step": {step}' in record_line(request) for step, request in enumerate(ended)] == [
        True
    ] * (NUM_CALLS + 1)


def test_every_agent_is_told_where_the_server_is() -> None:
    """In a variable, a file or a call."""
    for name, agent in AGENTS.items():
        places = (*agent.environment.values(), *agent.files.values(), *agent.prepare)
        assert any("{url}" in place for place in places), name
