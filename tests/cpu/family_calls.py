"""Calls as the families' chat templates write them, and what runs their grammars, for tests."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import tokenizers

from ramify.engine.logits.grammar import GrammarCompiler
from ramify.engine.logits.logits_processors import GrammarMatcher
from ramify.engine.text.tokenizer import Tokenizer
from ramify.params import StructuredOutput
from ramify.server.grammars.tool_schemas import SchemaWarnings, enforceable_schema
from ramify.server.model_dialects.call_grammar import AnswerGrammars
from ramify.server.model_dialects.call_syntax import CALL_SYNTAXES
from ramify.server.model_dialects.lark_rules import AddedTokens, CallableTool
from ramify.testing import write_tiny_checkpoint

END = 0  # not <|end|>, which is a mark of gpt-oss
MARKS = """<tool_call> </tool_call> [TOOL_CALLS] [ARGS] <|python_tag|> <|channel|> <|message|> <|call|>
<|constrain|> <|start|> <|end|> <think> </think> <seed:tool_call> </seed:tool_call> <|tool_call|>
<|/tool_call|> <|START_ACTION|> <|END_ACTION|> <|tool_calls_section_begin|> <|tool_call_begin|>
<|tool_call_argument_begin|> <|tool_call_end|> <|tool_calls_section_end|> <｜tool▁calls▁begin｜>
<｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> ｜DSML｜""".split()
# Templates that tell the variants of a family apart.
VARIANTS = [
    *((family, "") for family in CALL_SYNTAXES),
    ("mistral", "[ARGS]"),
    ("deepseek_v3", "```json"),
    ("granite", "<|tool_call|>"),
    ("phi4", "functools["),
]
UNMARKED = [("json", ""), ("command_r", ""), ("glm4", ""), ("phi4", "functools[")]
MARKED = [variant for variant in VARIANTS if variant not in UNMARKED]


def call_text(family: str, template: str, name: str, arguments: Mapping[str, Any]) -> str:
    """One call as the family's chat template writes it."""
    text = json.dumps(arguments, ensure_ascii=False)
    plain = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)

    def value(argument: object) -> str:
        return argument if isinstance(argument, str) else json.dumps(argument, ensure_ascii=False)

    def tags(begin: str, middle: str, end: str) -> str:
        return "".join(
            f"{begin}{key}{middle}{value(item)}{end}\n" for key, item in arguments.items()
        )

    qwen = f"\n<function={name}>\n{tags('<parameter=', '>', '</parameter>')}</function>\n"
    fence = f"function<｜tool▁sep｜>{name}\n```json\n{text}\n```"
    deepseek = fence if template else f"{name}<｜tool▁sep｜>{text}"
    cohere = json.dumps([{"tool_call_id": "0", "tool_name": name, "parameters": arguments}])
    command_r = json.dumps([{"tool_name": name, "parameters": arguments}], indent=4)
    granite = f"<|tool_call|>[{plain}]" if template else f"<tool_call>\n{plain}\n</tool_call>"
    minimax = tags('<parameter name="', '">', "</parameter>")
    dsml = "".join(
        f'<｜DSML｜parameter name="{key}" string="{json.dumps(isinstance(item, str))}">'
        f"{value(item)}</｜DSML｜parameter>\n"
        for key, item in arguments.items()
    )
    return {
        "deepseek_v32": (
            f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="{name}">\n{dsml}</｜DSML｜invoke>\n'
            "</｜DSML｜function_calls>"
        ),
        "harmony": f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{text}<|call|>",
        "mistral": f"[TOOL_CALLS]{name}[ARGS]{text}" if template else f"[TOOL_CALLS][{plain}]",
        "deepseek_v3": (
            f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{deepseek}"
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        "kimi_k2": (
            f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0"
            f"<|tool_call_argument_begin|>{text}<|tool_call_end|><|tool_calls_section_end|>"
        ),
        "cohere": f"<|START_ACTION|>{cohere}<|END_ACTION|>",
        "glm": (
            f"<tool_call>{name}\n"
            f"{tags('<arg_key>', '</arg_key><arg_value>', '</arg_value>')}</tool_call>"
        ),
        "seed_oss": f"<seed:tool_call>{qwen}</seed:tool_call>",
        "qwen3_coder": f"<tool_call>{qwen}</tool_call>",
        "minimax_m2": (
            f'<minimax:tool_call>\n<invoke name="{name}">\n{minimax}</invoke>\n</minimax:tool_call>'
        ),
        "hunyuan": f"<tool_calls>[{plain}]</tool_calls>",
        "nemotron": f"<TOOLCALL>[{plain}]</TOOLCALL>",
        "phi4": f"functools[{plain}]" if template else f"<|tool_call|>[{plain}]<|/tool_call|>",
        "command_r": f"Action:\n```json\n{command_r}\n```",
        "glm4": f"{name}\n{text}",
        "smollm3": f"<tool_call>\n{plain}\n</tool_call>",
        "granite": granite,
        "hermes": f"<tool_call>\n{plain}\n</tool_call>",
        "llama3_json": f"<|python_tag|>{plain.replace('arguments', 'parameters', 1)}",
        "json": plain,
    }[family]


@cache
def tokenizer(*, has_marks: bool, are_special: bool = True) -> tokenizers.Tokenizer:
    """The tiny checkpoints' tokenizer, with the families' marks as added tokens or without."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_checkpoint(Path(folder), "llama")
        core = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    if has_marks:
        marks = [tokenizers.AddedToken(m, special=are_special, normalized=False) for m in MARKS]
        core.add_tokens(marks)
    return core


@cache
def compiler(*, has_marks: bool) -> GrammarCompiler:
    core = tokenizer(has_marks=has_marks)
    return GrammarCompiler(core.to_str, vocab_size=core.get_vocab_size(), eos_token_ids=[END])


def grammars(family: str, template: str, *, has_marks: bool) -> AnswerGrammars:
    wrapped = Tokenizer(tokenizer(has_marks=has_marks), special_tokens={}, chat_templates={})
    return AnswerGrammars(family, AddedTokens(wrapped.added_token_texts), template=template)


def start(spec: StructuredOutput | None, *, has_marks: bool) -> GrammarMatcher:
    assert spec is not None
    return compiler(has_marks=has_marks).compile(spec)


def is_allowed(matcher: GrammarMatcher, ids: Sequence[int], token: int) -> bool:
    mask = matcher.token_bitmasks(ids, ())[0]
    return mask is None or bool(mask[token // 8] >> (token % 8) & 1)


def num_accepted(matcher: GrammarMatcher, ids: Sequence[int]) -> int:
    """How many of the tokens may be written."""
    for position, token in enumerate(ids):
        if not is_allowed(matcher, ids[:position], token):
            return position
    matcher.advance(ids)
    return len(ids)


def encoded(text: str, *, has_marks: bool) -> list[int]:
    return list(tokenizer(has_marks=has_marks).encode(text, add_special_tokens=False).ids)


def tools_of(schemas: Sequence[Mapping[str, Any]]) -> list[CallableTool]:
    return [
        CallableTool(name, enforceable_schema(schema, name, SchemaWarnings(), strict=True))
        for name, schema in zip(("first", "second"), schemas, strict=True)
    ]
