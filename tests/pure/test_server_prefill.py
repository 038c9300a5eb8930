"""An answer that the client began: the prompt ends with exactly that text, whatever the template writes."""

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.engine.text.special_tokens import ESCAPE_CHAR
from ramify.engine.text.tokenizer import Tokenizer
from ramify.errors import ChatTemplateError
from ramify.server.prompts.answer_opening import PREFILL_END
from ramify.server.prompts.renderer import PromptRenderer
from tests.budget import examples
from tests.pure.server_bench import TINY

LOOP = "{% for message in messages %}"
END = "{% endfor %}{% if add_generation_prompt %}"
TEMPLATES = {
    "chatml": LOOP + "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n" + END
    + "<|im_start|>assistant\n{% endif %}",
    "llama": LOOP + "<|start|>{{ message.role }}<|end|>\n\n{{ message.content | trim }}<|eot|>" + END
    + "<|start|>assistant<|end|>\n\n{% endif %}",
    "mistral": LOOP + "{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% else %} {{ message.content.strip() }}</s>{% endif %}" + END + "{% endif %}",
    "thinking": LOOP + "<|{{ message.role }}|>{% set content = message.content %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\n') %}"
    "{% endif %}{{ content }}<|end|>" + END + "<|assistant|><think>{% endif %}",
    "words": LOOP + "{{ message.role }}: {{ message.content }}\n" + END + "assistant: {% endif %}",
}  # fmt: skip
PIECES = st.sampled_from(
    ["<", ">", "|", "e", "end", "<|", "|>", "\n", " ", "é", "\u2042", "{", "s>"]
)
PREFILLS = st.one_of(st.lists(PIECES, max_size=6).map("".join), st.text(max_size=12))


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PromptRenderer]:
    """A renderer for each template."""
    made = {}
    for name, template in TEMPLATES.items():
        folder = tmp_path_factory.mktemp(name)
        shutil.copy(Path(TINY) / "tokenizer.json", folder)
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        made[name] = PromptRenderer(Tokenizer.load(folder))
    return made


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=examples(150), deadline=None)
@given(prefill=PREFILLS)
def test_the_prompt_ends_with_exactly_the_prefill(
    renderers: dict[str, PromptRenderer], template: str, prefill: str
) -> None:
    """Behind the same beginning for every prefill; special tokens in it stay text."""
    if template == "thinking" and "</think>" in prefill:
        return
    renderer = renderers[template]
    turns = [{"role": "user", "content": "Say e | <end>"}]

    def prompt(text: str) -> str:
        messages = [*turns, {"role": "assistant", "content": text}]
        return renderer.chat(messages, [], continue_final_message=True).text

    beginning = prompt("x").removesuffix("x")
    escaped = renderer.tokenizer.escape_special_tokens([{"content": prefill}])[0]["content"]

    assert prompt(prefill) == beginning + escaped
    assert escaped.replace(ESCAPE_CHAR, "") == prefill.replace(ESCAPE_CHAR, "")
    assert PREFILL_END not in beginning


def test_a_template_that_leaves_the_last_message_out_is_an_error(tmp_path: Path) -> None:
    """The message says what to send."""
    shutil.copy(Path(TINY) / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

    with pytest.raises(ChatTemplateError, match="does not write the last message"):
        PromptRenderer(Tokenizer.load(tmp_path)).chat(messages, [], continue_final_message=True)
