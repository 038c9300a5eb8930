"""A loop of calls and results against a server of a family's template: tokens of each step."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ramify.engine.text.tokenizer import Tokenizer
from tests.cpu.family_templates import END, FAMILY_TEMPLATES, TEXT, THOUGHT, FamilyTemplate
from tests.pure.server_bench import TINY, ServerBench

PAGE_SIZE = 16
# Keeps thoughts behind the last answer without a call, also before a question.
KIMI = FamilyTemplate(
    "kimi_k2_thinking",
    (),
    "kimi_k2",
    "think",
    f"<think>{THOUGHT}</think>{TEXT}<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0"
    '<|tool_call_argument_begin|>{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>',
    THOUGHT,
)
REASONING_FAMILIES = [*(family for family in FAMILY_TEMPLATES if family.thought), KIMI]
SYSTEM = "You are an agent. " + "Follow the rules. " * 20
QUESTION = "Who lives in Rome, and who in Paris?"
PATHS = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "previous": "/v1/responses",
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "A city."}},
    "required": ["city"],
}


@cache
def tokenizer_of(family: str) -> Tokenizer:
    """The built-in model's tokenizer with a family's special tokens and templates."""
    template = next(row for row in (*FAMILY_TEMPLATES, KIMI) if row.name == family)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        shutil.copyfile(TINY / "tokenizer.json", path / "tokenizer.json")
        settings = json.loads((TINY / "tokenizer_config.json").read_text(encoding="utf-8"))
        settings["additional_special_tokens"] += template.special_tokens
        settings["eos_token"] = END
        (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        (path / "additional_chat_templates").mkdir()
        for name, source in template.templates.items():
            is_default = name == "default"
            file = "chat_template" if is_default else f"additional_chat_templates/{name}"
            (path / f"{file}.jinja").write_text(source, encoding="utf-8")
        return Tokenizer.load(path)


@dataclass(frozen=True)
class LoopStep:
    """A request of the loop.

    Args:
        prompt, answer: token ids.
        num_computed, num_written: of the prompt, as `usage.ramify_cache` has them.
        reason: of the miss.
    """

    prompt: array[int]
    answer: array[int]
    num_computed: int
    num_written: int
    reason: str | None


class LoopServer(ServerBench):
    """A server whose model writes `answer` in the tokenizer's own tokens."""

    def __init__(self, family: FamilyTemplate) -> None:
        super().__init__(
            tokenizer=tokenizer_of(family.name),
            page_size=PAGE_SIZE,
            max_model_len=32_768,
            pool_tokens=65_536,
        )
        self.family = family
        tokenizer = self.service.tokenizer
        [end] = tokenizer.encode(END, False)
        self.script = [*tokenizer.encode(family.answer, False), end]
        self.device.next_token = self._next

    def _next(self, context: Sequence[int]) -> int:
        [live] = self.core.live
        return int(self.script[min(len(context) - len(live.prompt_ids), len(self.script) - 1)])


class ToolLoop:
    """The client's side of the loop: the conversation so far, in the form of one API.

    Args:
        api: a key of `PATHS`; "previous" sends results alone, with `previous_response_id`.
        has_reasoning: the client sends reasoning back.
        uses_answers: the client sends back what the server answered; else a call of its own, as
            where the answers come from elsewhere.
    """

    def __init__(
        self, family: FamilyTemplate, api: str, *, has_reasoning: bool, uses_answers: bool
    ) -> None:
        self.family, self.api = family, api
        self._has_reasoning, self._uses_answers = has_reasoning, uses_answers
        self._messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
        self._previous: str | None = None

    def body(self) -> dict[str, Any]:
        """The body of the next request."""
        function = {"name": "find", "description": "Who lives there."}
        limit = 400 if self._uses_answers else 1
        if self.api == "chat":
            return {
                "messages": [{"role": "system", "content": SYSTEM}, *self._messages],
                "tools": [{"type": "function", "function": {**function, "parameters": SCHEMA}}],
                "max_tokens": limit,
                "chat_template_kwargs": dict(self.family.options),
            }
        if self.api == "messages":
            body: dict[str, Any] = {
                "model": "tiny",
                "system": SYSTEM,
                "messages": self._messages,
                "tools": [{**function, "input_schema": SCHEMA}],
                "max_tokens": limit,
            }
            if self.family.options:
                body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
            return body
        body = {
            "instructions": SYSTEM,
            "input": self._messages,
            "tools": [{"type": "function", **function, "parameters": SCHEMA, "strict": False}],
            "max_output_tokens": limit,
        }
        if self.family.options:
            body["reasoning"] = {"effort": "medium"}
        if self._previous is not None:
            body["previous_response_id"] = self._previous
        return body

    def add(self, step: int, response: dict[str, Any]) -> None:
        """Append an answer and the results of its calls."""
        result = f"Result {step}: " + "Ann lives there. " * 10
        id_ = f"abcdef{step:03}"
        add = {"chat": self._add_chat, "messages": self._add_blocks}.get(self.api, self._add_items)
        add(response, result, id_)

    def _add_chat(self, response: dict[str, Any], result: str, id_: str) -> None:
        if self._uses_answers:
            message = response["choices"][0]["message"]
        else:
            function = {"name": "find", "arguments": '{"city": "Rome"}'}
            message = {
                "role": "assistant",
                "content": self.family.text,
                "tool_calls": [{"id": id_, "type": "function", "function": function}],
                "reasoning_content": self.family.thought,
            }
        if not self._has_reasoning:
            message = {k: v for k, v in message.items() if not k.startswith("reasoning")}
        [call] = message["tool_calls"]
        self._messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": result}]

    def _add_blocks(self, response: dict[str, Any], result: str, id_: str) -> None:
        blocks = response["content"]
        if not self._uses_answers:
            call = {"type": "tool_use", "id": id_, "name": "find", "input": {"city": "Rome"}}
            texts = [{"type": "text", "text": self.family.text}] if self.family.text else []
            thought = {"type": "thinking", "thinking": self.family.thought, "signature": "x"}
            blocks = [thought, *texts, call]
        if not self._has_reasoning:
            blocks = [block for block in blocks if block["type"] != "thinking"]
        [call] = [block for block in blocks if block["type"] == "tool_use"]
        answer = {"type": "tool_result", "tool_use_id": call["id"], "content": result}
        self._messages += [
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": [answer]},
        ]

    def _add_items(self, response: dict[str, Any], result: str, id_: str) -> None:
        items = response["output"]
        if not self._uses_answers:
            arguments = '{"city": "Rome"}'
            thought = [{"type": "reasoning_text", "text": self.family.thought}]
            items = [
                {"type": "reasoning", "summary": [], "content": thought},
                {"role": "assistant", "content": self.family.text},
                {"type": "function_call", "call_id": id_, "name": "find", "arguments": arguments},
            ]
            items = [item for item in items if item.get("content") != ""]
        if not self._has_reasoning:
            items = [item for item in items if item.get("type") != "reasoning"]
        [call] = [item for item in items if item.get("type") == "function_call"]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": result}
        if self.api == "previous":
            self._previous, self._messages = response["id"], [output]
        else:
            self._messages += [*items, output]


def run_loop(
    family: FamilyTemplate,
    api: str,
    *,
    num_steps: int,
    has_reasoning: bool = True,
    uses_answers: bool = True,
) -> list[LoopStep]:
    """The steps of a loop against a server with an empty cache."""

    async def main() -> list[LoopStep]:
        server = LoopServer(family)
        loop = ToolLoop(family, api, has_reasoning=has_reasoning, uses_answers=uses_answers)
        steps = []
        async with server.running():
            for step in range(num_steps):
                response = await server.post(PATHS[api], loop.body())
                assert response.status == 200, response.body
                generation = server.ended[-1]
                usage, output = generation.cache, generation.output
                assert usage is not None
                assert output is not None
                steps.append(
                    LoopStep(
                        generation.request.prompt.ids,
                        array("i", output.completions[0].token_ids),
                        usage.computed,
                        usage.written,
                        None if usage.miss is None else usage.miss.reason,
                    )
                )
                loop.add(step, response.json)
        return steps

    return asyncio.run(main())
