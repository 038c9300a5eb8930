"""Families' chat templates (our own text in each family's real form), and answers in its syntax.

`chat_templates/NAME.jinja` has the roles, special tokens, tools, documents and switches that the
published template of the family has, without its wording.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "chat_templates"
THOUGHT, TEXT = "I must look.", "I look it up."
ARGUMENTS = {"city": "Rome"}
SPECIAL = re.compile(
    r"<[|｜][^|｜<>]+[|｜]>|\[/?[A-Z_]{3,}\]|\[\|\w+\|\]|</?seed:\w+>|｜DSML｜|<\w+_of_turn>|<sop>"
)
END = "<end of family>"
Messages = list[dict[str, Any]]
Change = Callable[[Messages], Messages]


@dataclass(frozen=True)
class FamilyTemplate:
    """One chat template of a family.

    Args:
        calls, reasoning: the formats that its template shows.
        answer: thoughts, text and a call of `find` as the model writes them.
        thought, text: what the answer means.
        reads: turns messages in OpenAI's form into those that the template expects.
        switch: the variable that turns thoughts on and off.
        options: of requests; the answer follows a prompt with them.
    """

    name: str
    model_types: tuple[str, ...]
    calls: str
    reasoning: str
    answer: str
    thought: str = ""
    text: str = TEXT
    reads: tuple[Change, ...] = ()
    switch: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    takes_tools: bool = True
    takes_documents: bool = False
    file: str = ""
    tools_variable: str = "tools"

    @property
    def templates(self) -> dict[str, str]:
        """Name → Jinja source."""
        file = self.file or self.name
        named = {path.stem.partition(".")[2]: path for path in FOLDER.glob(f"{file}.*jinja")}
        return {name or "default": path.read_text(encoding="utf-8") for name, path in named.items()}

    @property
    def special_tokens(self) -> list[str]:
        """Those of the templates and of the answer."""
        text = "\n".join((*self.templates.values(), self.answer))
        return [*dict.fromkeys(SPECIAL.findall(text)), END]

    def expected(self, messages: Messages) -> Messages:
        """The messages as the template expects them."""
        copy: Messages = json.loads(json.dumps(messages))
        for change in self.reads:
            copy = change(copy)
        return copy


# -- what templates expect -----------------------------------------------------------------------


def json_arguments(messages: Messages) -> Messages:
    """Arguments as JSON text."""
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return messages


def null_content(messages: Messages) -> Messages:
    """None as the content of a message with calls."""
    return [{**m, "content": None} if "tool_calls" in m else m for m in messages]


def renamed(name: str) -> Change:
    """Reasoning under another name."""

    def change(messages: Messages) -> Messages:
        for message in messages:
            if "reasoning_content" in message:
                message[name] = message.pop("reasoning_content")
        return messages

    return change


def thinking_parts(messages: Messages) -> Messages:
    """Reasoning as a part of the content."""
    for message in messages:
        if "reasoning_content" in message:
            parts = [{"type": "thinking", "thinking": message.pop("reasoning_content")}]
            text = message["content"]
            message["content"] = parts + ([{"type": "text", "text": text}] if text else [])
    return messages


def result_role(role: str) -> Change:
    """Results of tools under another role."""
    return lambda messages: [{**m, "role": role} if m["role"] == "tool" else m for m in messages]


def written(write: Callable[[str, str], str]) -> Change:
    """Calls as the end of the text; `write` takes name and arguments."""

    def change(messages: Messages) -> Messages:
        for message in messages:
            for call in message.pop("tool_calls", ()):
                function = call["function"]
                text = write(function["name"], json.dumps(function["arguments"]))
                message["content"] = "\n".join(filter(None, (message["content"], text)))
        return messages

    return change


def metadata(messages: Messages) -> Messages:
    """GLM-4: the name of a call is metadata of a message, whose content are the arguments."""
    changed: Messages = []
    for message in messages:
        calls = message.pop("tool_calls", ())
        if message["content"] or not calls:
            changed.append(message)
        for call in calls:
            function = call["function"]
            content = json.dumps(function["arguments"])
            changed.append({"role": "assistant", "metadata": function["name"], "content": content})
    return changed


def joined_users(messages: Messages) -> Messages:
    """Consecutive messages of the user as one."""
    joined: Messages = []
    for message in messages:
        if joined and joined[-1]["role"] == message["role"] == "user":
            joined[-1]["content"] += "\n" + message["content"]
        else:
            joined.append(message)
    return joined


def system_in_user(messages: Messages) -> Messages:
    """The system prompt before the first text of the user."""
    system, user, *rest = messages
    return [{**user, "content": f"{system['content']}\n\n{user['content']}"}, *rest]


def system_tools(write: Callable[[Any], Any]) -> Change:
    """Tools as a field of the system message."""
    return lambda messages: [{**messages[0], "tools": write(TOOLS)}, *messages[1:]]


TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Who lives there.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "A city."}},
            "required": ["city"],
        },
    },
}
TOOLS = [TOOL]
JSON_CALL = '{"name": "find", "arguments": {"city": "Rome"}}'
bare_json = written(lambda name, arguments: f'{{"name": "{name}", "arguments": {arguments}}}')
granite_call = written(
    lambda name, arguments: f'<|tool_call|>[{{"name": "{name}", "arguments": {arguments}}}]'
)
AS_TEXT = (bare_json, result_role("user"), joined_users)
HERMES = f"\n<tool_call>\n{JSON_CALL}\n</tool_call>"
FENCED = f"{TEXT}\n```json\n{JSON_CALL}\n```"
CODE = '```tool_code\nfind(city="Rome")\n```'
PARAMETER = "<parameter=city>Rome</parameter>"
V3_CALL = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{"city": "Rome"}\n'
    "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)

# name, model types, format of calls, format of reasoning, answer
FAMILY_TEMPLATES = [
    FamilyTemplate(
        "llama", ("llama",), "llama3_json", "none", '{"name": "find", "parameters": {"city": "Rome"}}',
        text="",
    ),
    FamilyTemplate(
        "mistral_v3", ("mistral", "ministral", "mixtral"), "mistral", "none",
        f"[TOOL_CALLS][{JSON_CALL}]", text="",
    ),
    FamilyTemplate(
        "mistral_v13", ("mistral", "ministral"), "mistral", "mistral",
        f'[THINK]{THOUGHT}[/THINK]{TEXT}[TOOL_CALLS]find[ARGS]{{"city": "Rome"}}',
        THOUGHT, reads=(thinking_parts,),
    ),
    FamilyTemplate("qwen2", ("qwen2", "qwen2_moe"), "hermes", "none", TEXT + HERMES),
    FamilyTemplate(
        "qwen3", ("qwen3", "qwen3_moe"), "hermes", "think",
        f"<think>\n{THOUGHT}\n</think>\n\n{TEXT}{HERMES}", THOUGHT, switch="enable_thinking",
    ),
    FamilyTemplate(
        "qwen3_coder", ("qwen3_moe",), "qwen3_coder", "none",
        f"{TEXT}\n\n<tool_call>\n<function=find>\n<parameter=city>\nRome\n</parameter>\n</function>\n"
        "</tool_call>",
    ),
    FamilyTemplate(
        "gemma2", ("gemma", "gemma2"), "gemma", "none", f"{TEXT}\n{CODE}",
        reads=(*AS_TEXT, system_in_user), takes_tools=False,
    ),
    FamilyTemplate(
        "gemma3", ("gemma3_text",), "gemma", "none", f"{TEXT}\n{CODE}",
        reads=AS_TEXT, takes_tools=False,
    ),
    FamilyTemplate(
        "phi3", ("phi3",), "json", "none", JSON_CALL, text="", reads=AS_TEXT, takes_tools=False
    ),
    FamilyTemplate(
        "phi4_mini", ("phi3",), "phi4", "none", f"<|tool_call|>[{JSON_CALL}]<|/tool_call|>", text="",
        reads=(
            written(
                lambda name, arguments: (
                    f'<|tool_call|>[{{"name": "{name}", "arguments": {arguments}}}]<|/tool_call|>'
                )
            ),
            system_tools(json.dumps),
        ),
        tools_variable="",
    ),
    FamilyTemplate(
        "olmo2", ("olmo2", "olmoe"), "json", "none", FENCED, reads=AS_TEXT, takes_tools=False
    ),
    FamilyTemplate(
        "olmo3", ("olmo3",), "olmo3", "none",
        f'{TEXT}<function_calls>find(city="Rome")</function_calls>',
    ),
    FamilyTemplate(
        "granite32", ("granite",), "granite", "granite",
        f"Here is my thought process: {THOUGHT} Here is my response: {TEXT}<|tool_call|>[{JSON_CALL}]",
        THOUGHT, reads=(granite_call,), switch="thinking", takes_documents=True,
    ),
    FamilyTemplate(
        "granite33", ("granite",), "granite", "granite33",
        f"<think>{THOUGHT}</think><response>{TEXT}</response><|tool_call|>[{JSON_CALL}]",
        THOUGHT, reads=(granite_call,), switch="thinking", takes_documents=True,
    ),
    FamilyTemplate(
        "granite4", ("granitemoehybrid",), "granite", "none", TEXT + HERMES, takes_documents=True
    ),
    FamilyTemplate(
        "smollm3", ("smollm3",), "smollm3", "think", f"<think>\n{THOUGHT}\n</think>\n{TEXT}{HERMES}",
        THOUGHT,
        reads=(
            written(
                lambda name, arguments: (
                    f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
                )
            ),
        ),
        switch="enable_thinking", tools_variable="xml_tools",
    ),
    FamilyTemplate(
        "smollm3_code", ("smollm3",), "smollm3", "think",
        f'<think>\n{THOUGHT}\n</think>\n{TEXT}\n<code>\nfind(city="Rome")\n</code>', THOUGHT,
        reads=(
            written(
                lambda name, arguments: (
                    f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
                )
            ),
        ),
        switch="enable_thinking", file="smollm3", tools_variable="xml_tools",
    ),
    FamilyTemplate(
        "glm", ("glm",), "glm4", "none", '\nfind\n{"city": "Rome"}', text="",
        reads=(metadata, result_role("observation"), system_tools(list)), tools_variable="",
    ),
    FamilyTemplate(
        "glm4", ("glm4",), "glm4", "none", '\nfind\n{"city": "Rome"}', text="",
        reads=(metadata, result_role("observation")),
    ),
    FamilyTemplate(
        "glm4_moe", ("glm4_moe",), "glm", "think",
        f"\n<think>{THOUGHT}</think>\n{TEXT}\n<tool_call>find\n<arg_key>city</arg_key>\n"
        "<arg_value>Rome</arg_value>\n</tool_call>",
        THOUGHT, switch="enable_thinking",
    ),
    FamilyTemplate(
        "exaone4", ("exaone4",), "hermes", "think",
        f"{THOUGHT}\n</think>\n\n{TEXT}\n<tool_call>{JSON_CALL}</tool_call>", THOUGHT,
        switch="enable_thinking", options={"enable_thinking": True},
    ),
    FamilyTemplate(
        "command_r", ("cohere",), "command_r", "none",
        f'{TEXT}\nAction:\n```json\n[\n    {{\n        "tool_name": "find",\n'
        '        "parameters": {\n            "city": "Rome"\n        }\n    }\n]```',
        takes_documents=True,
    ),
    FamilyTemplate(
        "command_r7b", ("cohere2",), "cohere", "cohere",
        f'<|START_THINKING|>{THOUGHT}<|END_THINKING|><|START_ACTION|>[\n    {{"tool_call_id": "0", '
        '"tool_name": "find", "parameters": {"city": "Rome"}}\n]<|END_ACTION|>',
        THOUGHT, "", reads=(renamed("tool_plan"),), switch="reasoning", takes_documents=True,
    ),
    FamilyTemplate(
        "starcoder2", ("starcoder2",), "json", "none", FENCED, reads=(*AS_TEXT, system_in_user),
        takes_tools=False,
    ),
    FamilyTemplate(
        "stablelm", ("stablelm",), "json", "none", FENCED, reads=(bare_json,), takes_tools=False
    ),
    FamilyTemplate(
        "seed_oss", ("seed_oss",), "seed_oss", "seed_oss",
        f"<seed:think>{THOUGHT}</seed:think>{TEXT}\n<seed:tool_call>\n<function=find>\n{PARAMETER}\n"
        "</function>\n</seed:tool_call>",
        THOUGHT, switch="thinking_budget",
    ),
    FamilyTemplate(
        "hunyuan", ("hunyuan_v1_dense",), "hunyuan", "hunyuan",
        f"<think>\n{THOUGHT}\n</think>\n<answer>\n{TEXT}<tool_calls>[{JSON_CALL}]</tool_calls>\n</answer>",
        THOUGHT, switch="enable_thinking",
    ),
    FamilyTemplate(
        "deepseek_v2", ("deepseek_v2",), "json", "none", FENCED, reads=AS_TEXT, takes_tools=False
    ),
    FamilyTemplate(
        "deepseek_v3", ("deepseek_v3",), "deepseek_v3", "none", V3_CALL, text="",
        reads=(json_arguments, null_content), takes_tools=False,
    ),
    FamilyTemplate(
        "deepseek_r1", ("deepseek_v3",), "deepseek_v3", "think",
        f"{THOUGHT}\n</think>\n\n{V3_CALL}", THOUGHT, "", reads=(json_arguments, null_content),
        takes_tools=False,
    ),
    FamilyTemplate(
        "deepseek_v31", ("deepseek_v3",), "deepseek_v3", "think",
        f"{THOUGHT}</think>{TEXT}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>"
        '{"city": "Rome"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        THOUGHT, reads=(json_arguments,), switch="thinking", options={"thinking": True},
    ),
    FamilyTemplate(
        "deepseek_v32", ("deepseek_v32",), "deepseek_v32", "think",
        f'{THOUGHT}</think>{TEXT}\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="find">\n'
        '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        THOUGHT, switch="thinking",
    ),
    FamilyTemplate(
        "gpt_oss", ("gpt_oss",), "harmony", "harmony",
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.find <|constrain|>json<|message|>{"city": "Rome"}<|call|>',
        THOUGHT, "", reads=(renamed("thinking"),), switch="reasoning_effort",
    ),
]  # fmt: skip

# The published models whose templates these are.
PUBLISHED = {
    "llama": "Llama 3.1 to 3.3",
    "mistral_v3": "Mistral 7B v0.3, Nemo, Large; Ministral 8B; Mixtral 8x22B",
    "mistral_v13": "Magistral, Devstral, Ministral 3",
    "qwen2": "Qwen 2.5, also its MoE",
    "qwen3": "Qwen 3, dense and MoE",
    "qwen3_coder": "Qwen3-Coder",
    "gemma2": "Gemma 1 and 2",
    "gemma3": "Gemma 3",
    "phi3": "Phi-3, Phi-3.5",
    "phi4_mini": "Phi-4-mini",
    "olmo2": "OLMo 2, OLMoE",
    "olmo3": "Olmo 3",
    "granite32": "Granite 3.0 to 3.2",
    "granite33": "Granite 3.3",
    "granite4": "Granite 4",
    "smollm3": "SmolLM3",
    "smollm3_code": "SmolLM3, Python tools",
    "glm": "GLM-4-9B",
    "glm4": "GLM-4-0414",
    "glm4_moe": "GLM-4.5, 4.6",
    "exaone4": "EXAONE 4",
    "command_r": "Command R, R+",
    "command_r7b": "Command R7B, Command A",
    "starcoder2": "StarCoder2-Instruct",
    "stablelm": "StableLM 2",
    "seed_oss": "Seed-OSS",
    "hunyuan": "Hunyuan dense",
    "deepseek_v2": "DeepSeek V2",
    "deepseek_v3": "DeepSeek V3",
    "deepseek_r1": "DeepSeek R1",
    "deepseek_v31": "DeepSeek V3.1",
    "deepseek_v32": "DeepSeek V3.2",
    "gpt_oss": "gpt-oss",
}
