"""Answers as models of each family write them: an answer's parts, and the text of a chat template."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ramify.server.model_dialects import OutputFormat, named

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "flag": {"type": "boolean"},
        "items": {"type": "array"},
        "options": {"type": ["object", "null"]},
    },
}
TOOLS = ("add", "look_up", "mcp__git-log")
SCHEMAS = dict.fromkeys(TOOLS, SCHEMA)


@dataclass(frozen=True)
class Call:
    """A tool call that a model means to make."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ModelAnswer:
    """What a model means to say, and how it writes JSON."""

    reasoning: str
    text: str
    calls: list[Call]
    dumps: Callable[[object], str] = json.dumps


@dataclass(frozen=True)
class Family:
    """A family's format and how its template writes an answer."""

    name: str
    form: OutputFormat
    write: Callable[[ModelAnswer], str]
    prompt_end: str = ""
    quotes: str = ""  # no string of a call may contain it
    names: tuple[str, ...] = TOOLS
    # Text that is allowed in the answer's text and begins a mark, or would be one elsewhere.
    fragments: tuple[str, ...] = field(default=())
    is_thinking: bool = True
    is_bare: bool = False  # an answer is text or calls


def think(answer: ModelAnswer) -> str:
    """Reasoning between `<think>` tags, as Qwen's template writes it."""
    return f"<think>\n{answer.reasoning}\n</think>\n\n" if answer.reasoning else ""


def named_arguments(answer: ModelAnswer, call: Call, key: str = "arguments") -> str:
    """`{"name": …, "arguments": …}`."""
    return answer.dumps({"name": call.name, key: call.arguments})


def marked(begin: str, end: str, *, key: str = "arguments", answer: ModelAnswer) -> str:
    """Each call as JSON between two marks."""
    calls = [f"{begin}{named_arguments(answer, call, key)}{end}" for call in answer.calls]
    return think(answer) + "\n".join([answer.text, *calls] if answer.text else calls)


def listed(begin: str, end: str, answer: ModelAnswer) -> str:
    """All calls as one JSON list between two marks."""
    calls = answer.dumps(
        [{"name": call.name, "arguments": call.arguments} for call in answer.calls]
    )
    return think(answer) + answer.text + (f"{begin}{calls}{end}" if answer.calls else "")


def llama(answer: ModelAnswer) -> str:
    """Text, or calls with nothing before them."""
    calls = (named_arguments(answer, call, "parameters") for call in answer.calls)
    return answer.text + "; ".join(calls)


def fenced(answer: ModelAnswer) -> str:
    """Each call as JSON in a fence, after text."""
    calls = "\n".join(f"```json\n{named_arguments(answer, call)}\n```" for call in answer.calls)
    return answer.text + "\n" + calls if calls else answer.text


def pythonic(begin: str, end: str, separator: str, answer: ModelAnswer) -> str:
    """Calls in Python's syntax."""
    calls = separator.join(
        f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"
        for call in answer.calls
    )
    return answer.text + (f"{begin}{calls}{end}" if calls else "")


def mistral(answer: ModelAnswer) -> str:
    """Tokenizers from v11 on: a mark before each call."""
    calls = "".join(
        f"[TOOL_CALLS]{call.name}[ARGS]{answer.dumps(call.arguments)}" for call in answer.calls
    )
    return (f"[THINK]{answer.reasoning}[/THINK]" if answer.reasoning else "") + answer.text + calls


def mistral_v3(answer: ModelAnswer) -> str:
    """Tokenizers to v7: a list, with the id after the arguments."""
    calls = [
        {"name": call.name, "arguments": call.arguments, "id": "abcdef123"} for call in answer.calls
    ]
    return answer.text + (f"[TOOL_CALLS]{answer.dumps(calls)}" if calls else "")


def deepseek(answer: ModelAnswer, *, is_v3: bool) -> str:
    """V3 and R1 write the arguments in a fence, V3.1 behind the name."""
    pattern = "function<｜tool▁sep｜>%s\n```json\n%s\n```" if is_v3 else "%s<｜tool▁sep｜>%s"
    calls = [
        f"<｜tool▁call▁begin｜>{pattern % (call.name, answer.dumps(call.arguments))}<｜tool▁call▁end｜>"
        for call in answer.calls
    ]
    section = ("\n" if is_v3 else "").join(calls)
    section = f"<｜tool▁calls▁begin｜>{section}<｜tool▁calls▁end｜>" if calls else ""
    # The prompt ends with <think>.
    return f"{answer.reasoning}</think>{answer.text}{section}"


def value_text(answer: ModelAnswer, value: object) -> str:
    """A parameter's value: strings as they are, others as JSON."""
    return value if isinstance(value, str) else answer.dumps(value)


def dsml(answer: ModelAnswer) -> str:
    """DeepSeek V3.2."""
    calls = ""
    for call in answer.calls:
        parameters = "\n".join(
            f'<｜DSML｜parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
            f"{value_text(answer, value)}</｜DSML｜parameter>"
            for key, value in call.arguments.items()
        )
        calls += f'<｜DSML｜invoke name="{call.name}">\n{parameters}\n</｜DSML｜invoke>\n'
    section = f"\n\n<｜DSML｜function_calls>\n{calls}</｜DSML｜function_calls>" if calls else ""
    return f"{answer.reasoning}</think>{answer.text}{section}"


def tagged(
    begin: str, call_begin: str, key_begin: str, key_end: str, value_end: str, end: str,
    answer: ModelAnswer,
) -> str:  # fmt: skip
    """Calls with a tag for each parameter."""
    calls = ""
    for call in answer.calls:
        parameters = "".join(
            f"{key_begin}{key}{key_end}{value_text(answer, value)}{value_end}"
            for key, value in call.arguments.items()
        )
        calls += f"\n{begin}{call_begin % call.name}\n{parameters}{end}"
    return think(answer) + answer.text + calls


def minimax(answer: ModelAnswer) -> str:
    """One section with all calls."""
    calls = ""
    for call in answer.calls:
        parameters = "".join(
            f'<parameter name="{key}">{value_text(answer, value)}</parameter>\n'
            for key, value in call.arguments.items()
        )
        calls += f'<invoke name="{call.name}">\n{parameters}</invoke>\n'
    section = f"\n<minimax:tool_call>\n{calls}</minimax:tool_call>" if calls else ""
    # The prompt ends with <think>.
    return f"{answer.reasoning}\n</think>\n\n{answer.text}{section}"


def kimi(answer: ModelAnswer) -> str:
    """One section with all calls, each with an index."""
    calls = "".join(
        f"<|tool_call_begin|>functions.{call.name}:{index}<|tool_call_argument_begin|>"
        f"{answer.dumps(call.arguments)}<|tool_call_end|>"
        for index, call in enumerate(answer.calls)
    )
    section = f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>" if calls else ""
    return think(answer) + answer.text + section


def cohere(answer: ModelAnswer) -> str:
    """Command R7B and A: each part between marks."""
    calls = ",\n".join(
        "    "
        + answer.dumps({"tool_call_id": str(i), "tool_name": c.name, "parameters": c.arguments})
        for i, c in enumerate(answer.calls)
    )
    parts = [(answer.reasoning, "THINKING"), (answer.text, "RESPONSE")]
    text = "".join(f"<|START_{name}|>{part}<|END_{name}|>" for part, name in parts if part)
    return text + (f"<|START_ACTION|>[\n{calls}\n]<|END_ACTION|>" if calls else "")


def gemma_value(quote: str, value: object) -> str:
    """A value in the syntax of FunctionGemma and Gemma 4."""
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, dict):
        items = (f"{key}:{gemma_value(quote, item)}" for key, item in value.items())
        return "{" + ",".join(items) + "}"
    if isinstance(value, list):
        return "[" + ",".join(gemma_value(quote, item) for item in value) + "]"
    return json.dumps(value)


def gemma(begin: str, quote: str, end: str, answer: ModelAnswer) -> str:
    """FunctionGemma and Gemma 4."""
    calls = "".join(
        f"{begin}call:{call.name}{gemma_value(quote, call.arguments)}{end}" for call in answer.calls
    )
    return answer.text + calls


def gemma4(answer: ModelAnswer) -> str:
    """Gemma 4: a channel for thoughts."""
    thoughts = f"<|channel>thought\n{answer.reasoning}\n<channel|>" if answer.reasoning else ""
    return thoughts + gemma("<|tool_call>", '<|"|>', "<tool_call|>", answer)


def harmony(answer: ModelAnswer) -> str:
    """Messages; the prompt ends with the header's beginning."""
    messages = []
    if answer.reasoning:
        messages.append(f"<|channel|>analysis<|message|>{answer.reasoning}<|end|>")
    if answer.text:
        channel = "commentary" if answer.calls else "final"
        messages.append(f"<|channel|>{channel}<|message|>{answer.text}<|end|>")
    messages += [
        f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>"
        f"{answer.dumps(call.arguments)}<|call|>"
        for call in answer.calls
    ]
    return "<|start|>assistant".join(messages)


def granite(answer: ModelAnswer) -> str:
    """Granite 3: thoughts in prose, then a list of calls."""
    calls = answer.dumps([{"name": c.name, "arguments": c.arguments} for c in answer.calls])
    thoughts = f"Here is my thought process: {answer.reasoning} Here is my response: "
    return (
        (thoughts if answer.reasoning else "")
        + answer.text
        + (f"<|tool_call|>{calls}" if answer.calls else "")
    )


def command_r(answer: ModelAnswer) -> str:
    """Command R: a plan, then a fence with a list of actions."""
    calls = [{"tool_name": call.name, "parameters": call.arguments} for call in answer.calls]
    return answer.text + (f"\nAction: ```json\n{answer.dumps(calls)}\n```" if calls else "")


def glm4(answer: ModelAnswer) -> str:
    """GLM-4: a name and its arguments, each in a line, or text."""
    calls = "\n".join(f"{call.name}\n{answer.dumps(call.arguments)}" for call in answer.calls)
    return calls or answer.text


def smollm3(answer: ModelAnswer) -> str:
    """SmolLM3's other form: Python code."""
    return think(answer) + pythonic("<code>\n", "\n</code>", "\n", answer)


QWEN = partial(
    tagged, "<tool_call>\n", "<function=%s>", "<parameter=", ">\n", "\n</parameter>\n",
    "</function>\n</tool_call>",
)  # fmt: skip
SEED = partial(
    tagged, "<seed:tool_call>\n", "<function=%s>", "<parameter=", ">", "</parameter>\n",
    "</function>\n</seed:tool_call>",
)  # fmt: skip
GLM = partial(
    tagged, "<tool_call>", "%s", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n",
    "</tool_call>",
)  # fmt: skip
THINKING = "<|im_start|>assistant\n<think>\n"
HERMES = partial(marked, "<tool_call>\n", "\n</tool_call>")
IDENTIFIERS = ("add", "look_up")


def _hermes(answer: ModelAnswer) -> str:
    return HERMES(answer=answer)


def _phi4(answer: ModelAnswer) -> str:
    return marked("<|tool_call|>", "<|/tool_call|>", answer=answer)


FAMILIES = (
    Family("hermes", named("hermes", "think"), _hermes, fragments=("<tool_call>x", "</tool_call>")),
    Family("qwen3_coder", named("qwen3_coder", "think"), QWEN, fragments=("<function", "</think>")),
    Family("seed_oss", named("seed_oss", "think"), SEED),
    Family("glm", named("glm", "think"), GLM),
    Family("mistral", named("mistral", "mistral"), mistral),
    Family("mistral_v3", named("mistral", "none"), mistral_v3, is_thinking=False),
    Family("deepseek_v3", named("deepseek_v3", "think"), partial(deepseek, is_v3=True), THINKING),
    Family(
        "deepseek_v31", named("deepseek_v31", "think"), partial(deepseek, is_v3=False), THINKING
    ),
    Family("deepseek_v32", named("deepseek_v32", "think"), dsml, THINKING),
    Family("minimax", named("minimax_m2", "think"), minimax, THINKING),
    Family("kimi", named("kimi_k2", "think"), kimi),
    Family("cohere", named("cohere", "cohere"), cohere),
    Family("harmony", named("harmony", "harmony"), harmony, "<|start|>assistant"),
    Family("granite", named("granite", "granite"), granite),
    Family("phi4", named("phi4", "think"), _phi4),
    Family("hunyuan", named("hunyuan", "think"), partial(listed, "<tool_calls>", "</tool_calls>")),
    Family("nemotron", named("nemotron", "think"), partial(listed, "<TOOLCALL>", "</TOOLCALL>")),
    Family("functools", named("phi4", "think"), partial(listed, "functools", "")),
    Family("llama3", named("llama3_json", "none"), llama, is_thinking=False, is_bare=True),
    Family("json", named("json", "none"), llama, is_thinking=False, is_bare=True),
    Family("fenced", named("json", "none"), fenced, is_thinking=False),
    Family(
        "llama4_pythonic",
        named("llama4_pythonic", "none"),
        partial(pythonic, "[", "]", ", "),
        names=IDENTIFIERS,
        is_thinking=False,
        is_bare=True,
    ),
    Family(
        "lfm2",
        named("lfm2", "none"),
        partial(pythonic, "<|tool_call_start|>[", "]<|tool_call_end|>", ", "),
        names=IDENTIFIERS,
        is_thinking=False,
    ),
    Family(
        "olmo3",
        named("olmo3", "none"),
        partial(pythonic, "<function_calls>", "</function_calls>", "\n"),
        names=IDENTIFIERS,
        is_thinking=False,
    ),
    Family(
        "gemma",
        named("gemma", "none"),
        partial(pythonic, "```tool_code\n", "\n```", "\n"),
        names=IDENTIFIERS,
        is_thinking=False,
    ),
    Family(
        "functiongemma",
        named("functiongemma", "none"),
        partial(gemma, "<start_function_call>", "<escape>", "<end_function_call>"),
        quotes="<escape>",
        is_thinking=False,
    ),
    Family("command_r", named("command_r", "none"), command_r, is_thinking=False),
    Family("glm4", named("glm4", "none"), glm4, is_thinking=False, is_bare=True),
    Family("smollm3", named("smollm3", "think"), smollm3, names=IDENTIFIERS),
    Family("gemma4", named("gemma4", "gemma4"), gemma4, quotes='<|"|>'),
)
