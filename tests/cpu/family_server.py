"""A server whose model is of a family, and what transformers makes of the family's template."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ramify.engine.text.tokenizer import Tokenizer
from tests.cpu.family_templates import (
    ARGUMENTS,
    END,
    FAMILY_TEMPLATES,
    TOOLS,
    FamilyTemplate,
    Messages,
)
from tests.cpu.thinker import Thinker
from tests.pure.server_bench import TINY

transformers = pytest.importorskip("transformers", reason="the reference needs ramify[hf]")

QUESTION = "Who lives in Rome?"
SYSTEM = {"role": "system", "content": "Be brief."}
of_family = pytest.mark.parametrize("family", FAMILY_TEMPLATES, ids=lambda family: family.name)


@cache
def tokenizer_of(name: str) -> Tokenizer:
    """The built-in model's tokenizer with a family's special tokens and templates."""
    family = next(family for family in FAMILY_TEMPLATES if family.name == name)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        shutil.copyfile(TINY / "tokenizer.json", path / "tokenizer.json")
        settings = json.loads((TINY / "tokenizer_config.json").read_text(encoding="utf-8"))
        settings["additional_special_tokens"] += family.special_tokens
        settings["eos_token"] = END
        (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        (path / "additional_chat_templates").mkdir()
        for template, source in family.templates.items():
            is_default = template == "default"
            file = "chat_template" if is_default else f"additional_chat_templates/{template}"
            (path / f"{file}.jinja").write_text(source, encoding="utf-8")
        return Tokenizer.load(path)


def reference(family: FamilyTemplate, messages: Messages, **options: Any) -> str:
    """The prompt that transformers renders of the messages that the template expects."""
    if options.pop("with_tools", False):
        # Where tools are a field of the system message, `expected` has put them there.
        options |= {"tools": TOOLS} if family.tools_variable else {}
        options |= {family.tools_variable: TOOLS} if family.tools_variable else {}
    special = tokenizer_of(family.name).special_tokens
    expected = family.expected(messages)
    if any(message.get("content", "") is None for message in expected):
        # apply_chat_template drops None, which these templates test for; this is what renders.
        compiled = transformers.utils.chat_template_utils._compile_jinja_template(
            family.templates["default"]
        )
        rendered: str = compiled.render(
            messages=expected, add_generation_prompt=True, **special, **options
        )
        return rendered
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of(family.name)._core, chat_template=family.templates, **special
    )
    text: str = theirs.apply_chat_template(
        expected, tokenize=False, add_generation_prompt=True, **options
    )
    return text


def called(family: FamilyTemplate, id_: str = "abcdef123") -> Messages:
    """A conversation up to the result of a call."""
    answer: dict[str, Any] = {"role": "assistant", "content": family.text}
    if family.thought:
        answer["reasoning_content"] = family.thought
    function = {"name": "find", "arguments": dict(ARGUMENTS)}
    answer["tool_calls"] = [{"id": id_, "type": "function", "function": function}]
    result = {"role": "tool", "tool_call_id": id_, "content": "Ann."}
    return [SYSTEM, {"role": "user", "content": QUESTION}, answer, result]


class Family(Thinker):
    """A server whose model answers as one of a family does: special tokens are single tokens."""

    def __init__(self, family: FamilyTemplate) -> None:
        super().__init__(family.answer, tokenizer=tokenizer_of(family.name))
        self.family, self.own = family, tokenizer_of(family.name)
        [self._end] = self.own.encode(END, False)
        self._special = sorted(self.own.special_token_texts.values(), key=len, reverse=True)

    def _next(self, context: Sequence[int]) -> int:
        [live] = self.core.live
        ids = context[len(live.prompt_ids) :]
        rest = self.answer[len(self.own.decode(ids, skip_special_tokens=False)) :]
        special = next((text for text in self._special if text and rest.startswith(text)), "")
        if not rest:
            return self._end
        return self.own.encode(special or rest[0], False)[0]
