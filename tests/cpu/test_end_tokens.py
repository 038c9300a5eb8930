"""End tokens: the union of config.json, generation_config.json, the tokenizer and its chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ramify import LLM
from ramify.engine.text import template_limits
from ramify.engine.text.end_tokens import end_token_ids
from ramify.errors import ChatTemplateLimitError
from ramify.models.configs.wrappers import text_fields
from ramify.models.loader import read_config
from ramify.testing import write_tiny_checkpoint
from tests.cpu.family_server import of_family, tokenizer_of
from tests.cpu.family_templates import FamilyTemplate

# The token that ends a turn in the template, beside the end of text of the tokenizer. In all others
# it is the end of text, a turn has no end, or parts of an answer end as a turn does (gpt-oss).
TURN_ENDS = {
    "llama": "<|eot_id|>",
    "qwen2": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "smollm3": "<|im_end|>",
    "stablelm": "<|im_end|>",
    "gemma2": "<end_of_turn>",
    "gemma3": "<end_of_turn>",
    "phi3": "<|end|>",
    "phi4_mini": "<|end|>",
    "qwen3_coder": "<|im_end|>",
    "smollm3_code": "<|im_end|>",
    "exaone4": "[|endofturn|]",
    "seed_oss": "<seed:eos>",
    "granite32": "<|end_of_text|>",
    "granite33": "<|end_of_text|>",
    "granite4": "<|end_of_text|>",
    "command_r": "<|END_OF_TURN_TOKEN|>",
    "command_r7b": "<|END_OF_TURN_TOKEN|>",
}


def edit(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file, which may be new."""
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(old | fields))


@of_family
def test_the_template_shows_the_end_of_a_turn(family: FamilyTemplate) -> None:
    """Each family's own, and never a token that stands inside of an answer."""
    tokenizer = tokenizer_of(family.name)

    ends = [token for token in end_token_ids(tokenizer) if token not in tokenizer.eos_token_ids]

    expected = [TURN_ENDS[family.name]] if family.name in TURN_ENDS else []
    assert [tokenizer.token_text(token) for token in ends] == expected


def test_all_files_count(tmp_path: Path) -> None:
    """One token in each of config.json, generation_config.json and tokenizer, and one in the template."""
    path = write_tiny_checkpoint(tmp_path, "llama")
    first = LLM(path)
    assert first.tokenizer is not None
    special = dict(first.tokenizer.special_token_texts)
    [eos] = first.tokenizer.eos_token_ids
    turn_end = next(token for token, text in special.items() if token != eos)
    edit(path / "config.json", eos_token_id=5)
    edit(path / "generation_config.json", eos_token_id=[6, 7])
    template = (
        "{% for message in messages %}{{ message.content + '" + special[turn_end] + "' }}"
        "{% endfor %}"
    )
    edit(path / "tokenizer_config.json", chat_template=template)

    llm = LLM(path)

    assert llm.core.lifecycle.eos_token_ids == {5, 6, 7, eos, turn_end}


def test_a_wrapper_has_the_end_tokens_of_both_configurations() -> None:
    """Of the whole and of its text decoder."""
    text = {"model_type": "qwen2", "eos_token_id": 3}
    fields = {"model_type": "qwen2_vl", "eos_token_id": [4, 3], "text_config": text}

    made = text_fields(fields, "config.json", "Qwen2VLForConditionalGeneration", has_head=True)

    assert made["eos_token_id"] == [3, 4]


@pytest.mark.parametrize("named", [None, []])
def test_no_end_token_in_the_files_is_possible(tmp_path: Path, named: Any) -> None:
    """The tokenizer's remain."""
    path = write_tiny_checkpoint(tmp_path, "llama")
    edit(path / "config.json", eos_token_id=named)
    edit(path / "generation_config.json", eos_token_id=named)

    assert read_config(path).eos_token_ids == ()


def test_a_template_that_never_ends_does_not_keep_a_model_from_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts without a template are answered; a chat gets the error."""
    monkeypatch.setattr(template_limits, "MAX_RENDER_S", 0.2)
    path = write_tiny_checkpoint(tmp_path, "llama")
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    edit(path / "tokenizer_config.json", chat_template=endless)

    llm = LLM(path)

    [text] = llm.generate("abc")
    [chat] = llm.chat([{"role": "user", "content": "abc"}])
    assert text.error is None
    assert isinstance(chat.error, ChatTemplateLimitError)
