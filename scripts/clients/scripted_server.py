"""A server whose model is a script: it calls tools, follows schemas and repeats tool results.

The engine, the tokenizer and the HTTP server are the real ones; only the forward pass is scripted.

    python -m clients.scripted_server PORT [RECORD]

With RECORD the script is `AgentScript`, and the file gets a line of JSON for each ended request.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from clients.schema_instance import schema_instance
from ramify.config import EngineConfig, resolve
from ramify.engine.async_llm import AsyncLLM
from ramify.engine.core import EngineCore
from ramify.engine.logits.grammar import GrammarCompiler
from ramify.engine.text.detokenizer import Detokenizer
from ramify.engine.text.tokenizer import Tokenizer
from ramify.params import StructuredOutput
from ramify.server.app import Server
from ramify.server.generation import Generation, GenerationRequest
from ramify.server.operations.request_log import LineFile
from ramify.server.service import RequestService
from ramify.server.tenants import Caller
from ramify.testing import FakeExecutor
from tests.cpu.talker import TALKER_TEMPLATE, tokenizer_with

MAX_LEN = 16_384
TOOL_LINE = re.compile(r'^\{.*"name": "[^"]+".*\}$', re.MULTILINE)
RESULT = "Result: "
# Of a coding agent: the names of its shell tool and of the argument with the command.
AGENT_MAX_LEN = 262_144
NUM_CALLS = 3
STEPS_FILE = "steps.txt"
SHELL_TOOL = re.compile(
    r"(?i)bash|shell|(run_|local_)?shell(_command)?|exec_command|(execute|run)_commands?"
)
COMMAND_FIELDS = ("command", "cmd", "commands")


class ScriptedModel:
    """The next token of a prompt, from the answer that its text asks for.

    With tools and no result yet: a call of the first tool. With a schema, of the answer or in the
    prompt of a JSON answer: an instance of it. With a result: the result in a sentence. Else a sentence.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.end_id = tokenizer.encode("<|end|>", add_special_tokens=False)[0]
        self.answer_formats: dict[StructuredOutput | None, StructuredOutput | None] = {}
        self._answers: dict[bytes, list[int]] = {}
        self._lengths: set[int] = set()

    def register(self, request: GenerationRequest) -> None:
        """Remember the prompt of a request, and the schema that its answer must match."""
        prompt = request.prompt.ids
        structured = self.answer_formats.get(request.params.structured)
        schema: Mapping[str, Any] | None = None
        if structured is not None and structured.json_schema is not None:
            schema = json.loads(str(structured.json_schema))
        elif structured is not None and structured.json_object:
            schema = schema_in_prompt(request.prompt.text)
        text = self._answer(request.prompt.text, schema)
        self._answers[prompt.tobytes()] = list(self.tokenizer.encode(text, False))
        self._lengths.add(len(prompt))

    def next_token(self, context: Sequence[int]) -> int:
        """The token after `context`, which begins with a registered prompt."""
        ids = self.tokenizer.encode("", False)
        ids.extend(int(token) for token in context)
        for length in sorted(self._lengths, reverse=True):
            answer = self._answers.get(ids[:length].tobytes()) if length <= len(ids) else None
            if answer is not None:
                index = len(ids) - length
                return answer[index] if index < len(answer) else self.end_id
        return self.end_id

    def _answer(self, prompt: str, schema: Mapping[str, Any] | None) -> str:
        turns = prompt.split("<|user|>")
        if turns[-1].startswith(RESULT) and schema is None:
            return f"The result is {turns[-1][len(RESULT) :].split('<|end|>')[0].strip()}."
        header = prompt.partition("<|user|>")[0].replace("<|end|>", "\n")
        tools = [json.loads(line) for line in TOOL_LINE.findall(header)]
        if tools and not turns[-1].startswith(RESULT):
            function = tools[0].get("function", tools[0])
            arguments = schema_instance(function.get("parameters") or {"type": "object"})
            call = {"name": function["name"], "arguments": arguments}
            return f"<tool_call>{json.dumps(call)}</tool_call>"
        if schema is not None:
            return json.dumps(schema_instance(schema))
        return "It is sunny in Rome."


class AgentScript(ScriptedModel):
    """What a coding agent's model answers: `NUM_CALLS` calls of its shell tool, then a sentence.

    Each call prints a product that no prompt contains before the call has run. An agent without tools
    is told of `STEPS_FILE`: its model writes the number of the step there, and its test prints the product.
    """

    def _answer(self, prompt: str, schema: Mapping[str, Any] | None) -> str:
        shell, step = shell_tool(prompt), num_calls(prompt)
        if schema is not None:
            return super()._answer(prompt, schema)
        if step == NUM_CALLS:
            return f"Done: {step_result(step)}."
        if STEPS_FILE in prompt:
            return f"{STEPS_FILE}\n```\n{step + 1}\n```\n"
        if shell is None:
            return "A short title."
        call = {"name": shell["name"], "arguments": shell_arguments(shell, step + 1)}
        return f"<tool_call>{json.dumps(call)}</tool_call>"


def shell_tool(prompt: str) -> dict[str, Any] | None:
    """The definition of an agent's shell tool in a prompt."""
    header = prompt.partition("<|user|>")[0].replace("<|end|>", "\n")
    tools = [json.loads(line) for line in TOOL_LINE.findall(header)]
    functions = [tool.get("function", tool) for tool in tools]
    return next((tool for tool in functions if SHELL_TOOL.fullmatch(tool["name"])), None)


def num_calls(prompt: str) -> int:
    """How many of the script's calls stand in a prompt with their results, in order."""
    step = 0
    while step < NUM_CALLS and step_result(step + 1) in prompt:
        step += 1
    return step


def step_result(step: int) -> str:
    """What the call of a step prints."""
    return f"step {step} gives {step * 1001}"


def shell_arguments(function: Mapping[str, Any], step: int) -> dict[str, Any]:
    """The required arguments of a shell tool, whatever they are called, to print a step's result."""
    command = f"echo step {step} gives $(({step} * 1001))"
    schema = function["parameters"]
    properties = schema.get("properties", {})
    name = next(name for name in COMMAND_FIELDS if name in properties)
    required = {*schema.get("required", ()), name}
    arguments = {
        field: schema_instance(value, schema)
        for field, value in properties.items()
        if field in required
    }
    kind = properties[name].get("type")
    is_list = kind == "array" or "array" in json.dumps(properties[name].get("anyOf", ""))
    arguments[name] = [command] if name == "commands" and is_list else command
    if name == "command" and is_list:
        arguments[name] = ["bash", "-c", command]
    return arguments


def record_line(generation: Generation) -> str:
    """A line about an ended request: its step, its prompt's tokens, those read from the cache."""
    prompt = generation.request.prompt
    miss = generation.miss
    entry = {
        "step": num_calls(prompt.text),
        "is_loop": STEPS_FILE in prompt.text or shell_tool(prompt.text) is not None,
        "prompt": len(prompt.ids),
        "read": generation.num_cached,
        "end": generation.end_reason,
        "miss": None if miss is None else [miss.segment, miss.had, miss.got],
    }
    return json.dumps(entry) + "\n"


def schema_in_prompt(prompt: str) -> dict[str, Any]:
    """The first JSON schema with properties that stands in a prompt; any object's if there is none."""
    decoder = json.JSONDecoder()
    for match in re.finditer(r"\{", prompt):
        try:
            value, _ = decoder.raw_decode(prompt, match.start())
        except ValueError:
            continue
        if isinstance(value, dict) and "properties" in value:
            return value
    return {"type": "object"}


class ScriptedService(RequestService):
    """A service that shows each request to the scripted model before it starts."""

    script: ScriptedModel

    def watch_formats(self) -> None:
        """Tell the scripted model the format behind each constraint."""
        of_answer = self.constraints.of_answer

        def watched(*args: Any, **options: Any) -> StructuredOutput | None:
            constraint = of_answer(*args, **options)
            self.script.answer_formats[constraint] = options["answer_format"]
            return constraint

        self.constraints.of_answer = watched  # type: ignore[method-assign]

    async def start(self, request: GenerationRequest, caller: Caller, *, prefix: str) -> Generation:
        """See `RequestService.start`."""
        self.script.register(request)
        return await super().start(request, caller, prefix=prefix)


def scripted_service(
    new_script: type[ScriptedModel] = ScriptedModel, max_len: int = MAX_LEN
) -> ScriptedService:
    """A service over a scripted model with the tokenizer of ramify-tiny and a template with tools."""
    tokenizer = tokenizer_with(TALKER_TEMPLATE)
    options = EngineConfig.of(kv_cache_tokens=8 * max_len, page_size=16)
    config = resolve(options, model_max_len=max_len, token_bytes=1, free_memory=0)
    vocab_size = tokenizer.vocab_size
    script = new_script(tokenizer)
    executor = FakeExecutor(
        config.num_pages, 16, vocab_size=vocab_size, next_token=script.next_token
    )
    compiler = GrammarCompiler(
        tokenizer.to_json, vocab_size=vocab_size, eos_token_ids=[script.end_id]
    )
    core = EngineCore(
        config,
        executor,
        vocab_size=vocab_size,
        eos_token_ids=[script.end_id],
        detokenizer_factory=partial(Detokenizer, tokenizer),
        grammar_compiler=compiler.compile,
    )
    service = ScriptedService(
        AsyncLLM.from_core(core, tokenizer), tokenizer, model="ramify-tiny", aliases=("*",)
    )
    service.script = script
    service.watch_formats()
    return service


async def main() -> None:
    """Serve on 127.0.0.1 at the port of the command line."""
    if len(sys.argv) > 2:
        service = scripted_service(AgentScript, AGENT_MAX_LEN)
        record = LineFile(Path(sys.argv[2]))
        service.listeners.append(lambda generation: record.write(record_line(generation)))
    else:
        service = scripted_service()
    app = Server(service).app()
    config = uvicorn.Config(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
    await uvicorn.Server(config).serve()


if __name__ == "__main__":
    asyncio.run(main())
