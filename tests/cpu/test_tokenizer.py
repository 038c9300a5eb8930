"""Tokenizer and chat templates compared with transformers, and incremental detokenization."""

from __future__ import annotations

import json
import random
from array import array
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from ramify.engine.text import tokenizer as tokenizer_module
from ramify.engine.text.detokenizer import Detokenizer
from ramify.engine.text.tokenizer import Tokenizer
from ramify.errors import ChatTemplateError, CheckpointError, RequestError
from ramify.testing import write_tiny_checkpoint

TEXTS = (
    "",
    "hello there",
    "  two  spaces ",
    "naïve – 日本語 🙂🏽",
    "<|user|>hi<|end|>",
    "a\n\n\tb",
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Wie heißt das? 🙂"},
    {"role": "assistant", "content": "Das."},
    {"role": "user", "content": "<|bos|> is a token"},
]


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path, "llama")


def with_template(path: Path, template: Any) -> Tokenizer:
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    return Tokenizer.load(path)


@pytest.mark.parametrize("special", [True, False])
def test_encoding_is_that_of_transformers(path: Path, special: bool) -> None:
    """Encoding and decoding agree with transformers, with and without special tokens."""
    ours, theirs = Tokenizer.load(path), AutoTokenizer.from_pretrained(path)

    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=special)
        assert isinstance(ids, array)
        assert ids.typecode == "i"
        assert ids.tolist() == theirs(text, add_special_tokens=special)["input_ids"]
        for skip in (True, False):
            expected = theirs.decode(ids.tolist(), skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == expected


def test_the_tokenizer_knows_its_ids(path: Path) -> None:
    """Vocabulary size and special ids agree with transformers; `token_text` decodes one id."""
    ours, theirs = Tokenizer.load(path), AutoTokenizer.from_pretrained(path)

    assert ours.vocab_size == len(theirs)
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.special_token_ids == set(theirs.all_special_ids) | set(range(6))
    assert ours.token_text(2) == "<|end|>"
    assert ours.token_text(ours.encode("x", add_special_tokens=False)[0]) == "x"
    assert ours.token_text(299) == ""  # the model's vocabulary is larger than the tokenizer's
    assert ours.token_text(ours.encode("é", add_special_tokens=False)[0]) == "\ufffd"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}",
        "{% for m in messages %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
        "{{ bos_token }}\n  {% for m in messages %}\n  {{ m | tojson }}\n  {% endfor %}\n",
        "{{ messages | tojson(indent=2) }}{{ eos_token }}",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}",
        "{% if tools is none %}no tools{% else %}{{ tools | tojson }}{% endif %}",
        "{% if documents %}documents{% endif %}{% if unk_token is defined %}{{ unk_token }}{% endif %}",
        "{% if pad_token is defined %}{{ pad_token }}{% endif %}{{ extra }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}",
        "{{ messages[-1]['content'].split('t')[0] }}",
    ],
)
def test_chat_templates_render_as_in_transformers(path: Path, template: str) -> None:
    """Templates render as in transformers: white space, JSON, loop controls, tags and variables."""
    ours, theirs = with_template(path, template), AutoTokenizer.from_pretrained(path)

    for prompted in (True, False):
        rendered = ours.apply_chat_template(TALK, add_generation_prompt=prompted, extra="<&>")
        expected = theirs.apply_chat_template(
            TALK, tokenize=False, add_generation_prompt=prompted, extra="<&>"
        )
        assert rendered == expected


PARTS_TEMPLATES = {
    "selected (LLaVA)": (
        "{% for m in messages %}{{ m.role.upper() + ': ' }}{% for part in m.content | "
        "selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %};{% endfor %}"
    ),
    "looped over (SmolVLM)": (
        "{% for m in messages %}{{ m['role'].upper() }}{% if m['content'][0]['type'] == 'image' %}:"
        "{% else %}: {% endif %}{% for part in m['content'] %}{% if part['type'] == 'text' %}"
        "{{ part['text'] }}{% endif %}{% endfor %};{% endfor %}"
    ),
    "either": (
        "{% for m in messages %}{{ m.role.upper() + ': ' }}{{ m.content if m.content is string else "
        "m.content[0].text }};{% endfor %}"
    ),
}


@pytest.mark.parametrize("name", PARTS_TEMPLATES)
def test_texts_are_parts_where_a_template_takes_only_those(path: Path, name: str) -> None:
    """Templates of models that read images lose a text without an error; parts stay as they are."""
    ours = with_template(path, PARTS_TEMPLATES[name])
    parts = [{"type": "text", "text": "Du?"}]
    expected = "SYSTEM: Be brief.;USER: Wie heißt das? 🙂;ASSISTANT: Das.;USER: Du?;"

    assert ours.apply_chat_template([*TALK[:3], {"role": "user", "content": parts}]) == expected
    assert ours.render_chat([*TALK[:3], {"role": "user", "content": "Du?"}]) == expected


def test_eb17_a_chat_has_one_beginning(path: Path) -> None:
    """`encode_chat` adds no second bos token to the one the template writes."""
    ours, theirs = Tokenizer.load(path), AutoTokenizer.from_pretrained(path)

    ids = ours.encode_chat(TALK[:2])

    assert ids.tolist().count(1) == 1
    expected = theirs.apply_chat_template(TALK[:2], add_generation_prompt=True, return_dict=False)
    assert ids.tolist() == expected


def test_named_templates_and_files(path: Path) -> None:
    """`tool_use` serves requests with tools; chat_template.jinja wins over the configuration."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools: {{ tools | length }}"},
    ]
    ours = with_template(path, named)

    assert ours.apply_chat_template(TALK) == "plain"
    assert ours.apply_chat_template(TALK, tools=tools) == "tools: 1"
    (path / "chat_template.jinja").write_text("from a file")
    assert Tokenizer.load(path).apply_chat_template(TALK) == "from a file"
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text("other file")
    assert Tokenizer.load(path).apply_chat_template(TALK, tools=tools) == "other file"


def test_a_processors_template_stands_in_for_the_tokenizers(path: Path) -> None:
    """Models that read images have it in chat_template.json, which the other files win over."""
    file = path / "chat_template.json"
    file.write_text(json.dumps({"chat_template": "of a processor"}))
    with_template(path, None)

    assert Tokenizer.load(path).apply_chat_template(TALK) == "of a processor"
    assert with_template(path, "plain").apply_chat_template(TALK) == "plain"
    with_template(path, None)
    for content in ("{", '{"chat_template": 5}'):
        file.write_text(content)
        with pytest.raises(CheckpointError, match=r"chat_template.json.*download it again"):
            Tokenizer.load(path)


def test_the_time_is_available_to_templates(path: Path) -> None:
    """Templates can call `strftime_now`, as those of Llama 3 do."""
    ours = with_template(path, "{{ strftime_now('%Y') | length }}")

    assert ours.apply_chat_template(TALK) == "4"


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, TALK, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", TALK, "roles must alternate"),
        ("{{ messages[0].content + 'x' }}", [{"role": "user", "content": None}], "1 messages"),
        ("{{ messages[7].content }}", TALK, "4 messages"),
        ("{% if %}", TALK, "cannot render"),
        ("{{ ''.__class__.__mro__ }}", TALK, "cannot render"),
        ("{{ messages.append(1) }}", TALK, "cannot render"),
        ("{{ 1 / 0 }}", TALK, "cannot render"),
    ],
)
def test_a_refused_conversation_is_the_request_s_fault(
    path: Path, template: str | None, messages: list[Any], message: str
) -> None:
    """Every failure of a template to render messages raises ChatTemplateError."""
    ours = with_template(path, template)

    with pytest.raises(ChatTemplateError, match=message) as caught:
        ours.encode_chat(messages)

    assert isinstance(caught.value, RequestError)


def test_directories_without_a_tokenizer_say_so(tmp_path: Path) -> None:
    """Loading without tokenizer.json raises CheckpointError, which suggests token ids."""
    path = write_tiny_checkpoint(tmp_path, "llama", tokenizer=False)

    with pytest.raises(CheckpointError, match=r"tokenizer.json is missing.*token ids"):
        Tokenizer.load(path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_unreadable_tokenizer_files_are_told(path: Path, name: str) -> None:
    """A truncated tokenizer file raises CheckpointError with the file's name."""
    file = path / name
    file.write_text(file.read_text()[:100])

    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        Tokenizer.load(path)


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.step(token) for token in ids), detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_to_the_text(path: Path, text: str) -> None:
    """The pieces join to the text, and no piece ends inside a character."""
    tokenizer = Tokenizer.load(path)

    pieces = pieces_of(tokenizer, tokenizer.encode(text).tolist())

    assert "".join(pieces) == text.replace("<|user|>", "").replace("<|end|>", "")
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("seed", range(40))
def test_pieces_of_random_tokens_add_up_too(path: Path, seed: int) -> None:
    """Pieces of random ids, including broken bytes and special tokens, join to the decoded text."""
    tokenizer, rng = Tokenizer.load(path), random.Random(seed)
    ids = [rng.randrange(300) for _ in range(80)]

    pieces = pieces_of(tokenizer, ids)

    assert "".join(pieces) == tokenizer.decode(ids)


@pytest.mark.parametrize("seed", range(20))
def test_whole_characters_are_pieces_by_themselves(path: Path, seed: int) -> None:
    """A tokenizer that joins bytes gives the pieces that decoding each token behind the last gives."""
    tokenizer, rng = Tokenizer.load(path), random.Random(seed)
    words = [rng.choice(["a", "é", "日本", " 🙂b", "<|user|>", "\ufffd"]) for _ in range(30)]
    ids = tokenizer.encode("".join(words), add_special_tokens=False).tolist()
    ids += [rng.randrange(300) for _ in range(80)]
    single, joined = Detokenizer(tokenizer), Detokenizer(tokenizer)
    assert single._joins_bytes
    joined._joins_bytes = False

    assert [*map(single.step, ids)] == [*map(joined.step, ids)]
    assert single.finish() == joined.finish()


def test_texts_of_single_tokens_are_remembered_up_to_a_limit(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of `decode`, the first time and later, special tokens and unknown ids too."""
    monkeypatch.setattr(tokenizer_module, "MAX_DECODED", 7)
    tokenizer = Tokenizer.load(path)

    for token in [*range(300), *range(300), 10**6]:
        assert tokenizer.decode_token(token) == tokenizer.decode([token])
        assert len(tokenizer._decoded) <= 7
    tokenizer._decoded = dict.fromkeys(range(100, 109), "")  # as two threads may leave it
    assert tokenizer.decode_token(5) == tokenizer.decode([5])
    assert len(tokenizer._decoded) == 1


@pytest.mark.parametrize("seed", range(20))
def test_kept_special_tokens_stand_in_the_text(path: Path, seed: int) -> None:
    """Between kept special tokens, the pieces are those of an answer without them."""
    tokenizer, rng = Tokenizer.load(path), random.Random(seed)
    words = [rng.choice(["<|user|>", "<|end|>", "a é", " 🙂b"]) for _ in range(12)]
    ids = tokenizer.encode("".join(words), add_special_tokens=False).tolist()

    user, every = (
        "".join([*map(detokenizer.step, ids), detokenizer.finish()])
        for detokenizer in (Detokenizer(tokenizer, ["<|user|>"]), Detokenizer(tokenizer, True))
    )

    assert user == "".join(words).replace("<|end|>", "")
    assert every == "".join(words)


def test_an_incomplete_character_appears_at_the_end(path: Path) -> None:
    """`finish` returns the held-back bytes as U+FFFD and resets the detokenizer."""
    tokenizer = Tokenizer.load(path)
    ids = tokenizer.encode("a🙂", add_special_tokens=False).tolist()
    detokenizer = Detokenizer(tokenizer)

    pieces = [detokenizer.step(token) for token in ids[:-1]]

    assert pieces == ["a", "", "", ""]
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""
    assert "".join(detokenizer.step(token) for token in ids) == "a🙂"


def test_endless_broken_bytes_do_not_pile_up(path: Path) -> None:
    """Invalid continuation bytes are emitted as U+FFFD in pieces of fewer than 100 characters."""
    tokenizer = Tokenizer.load(path)
    broken = tokenizer.encode("é", add_special_tokens=False)[1]

    pieces = pieces_of(tokenizer, [broken] * 1000)

    assert "".join(pieces) == "\ufffd" * 1000
    assert max(map(len, pieces)) < 100


def sentencepiece_like() -> Tokenizer:
    """Tokenizer as in Llama 2: words carry their leading space, byte tokens cover the rest."""
    vocabulary = {"<s>": 0, "\u2581Hello": 1, "\u2581world": 2, "\u2581": 3, "!": 4}
    vocabulary |= {f"<0x{byte:02X}>": 5 + byte for byte in range(256)}
    core = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    core.add_special_tokens(["<s>"])
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(core, special_tokens={"bos_token": "<s>"}, chat_templates={})


def test_only_bytes_are_joined() -> None:
    """Where a token's text depends on the one before it, tokens are decoded together."""
    assert not sentencepiece_like().joins_bytes


def test_leading_spaces_survive_piece_by_piece() -> None:
    """A decoder that strips a text's first space keeps the leading space of later pieces."""
    tokenizer = sentencepiece_like()
    smile = [5 + byte for byte in "🙂".encode()]
    ids = [0, 1, 2, 0, 2, 3, 4, *smile, 4, 3, 3, 1]

    pieces = pieces_of(tokenizer, ids)

    assert pieces[1:3] == ["Hello", " world"]
    assert "".join(pieces) == tokenizer.decode(ids) == "Hello world world !🙂!   Hello"
    assert tokenizer.token_text(2) == " world"


def test_a_tokenizer_without_a_template_says_so() -> None:
    """Without a template `has_chat_template` is false and `encode_chat` raises."""
    tokenizer = sentencepiece_like()

    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.encode_chat(TALK)


def test_what_is_none_is_not_in_a_message(path: Path) -> None:
    """Templates do not see message fields that are None, as in transformers."""
    template = (
        "{% for m in messages %}{{ m.content }}|{% if m.tool_calls is defined %}"
        "{% for call in m.tool_calls %}{{ call }}{% endfor %}{% endif %};{% endfor %}"
    )
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": ["look"]},
        {"role": "assistant", "content": "ok", "tool_calls": None},
    ]
    ours, theirs = with_template(path, template), AutoTokenizer.from_pretrained(path)

    rendered = ours.apply_chat_template(talk)

    assert rendered == theirs.apply_chat_template(talk, tokenize=False) == "hi|;|look;ok|;"


def test_a_template_may_ask_whether_content_is_none(path: Path) -> None:
    """A template can test `m['content'] is none`, as DeepSeek's do for tool calls."""
    template = (
        "{% for m in messages %}{% if m['content'] is none %}call{% else %}"
        "{{ 'said ' + m['content'] }}{% endif %};{% endfor %}"
    )
    ours = with_template(path, template)

    assert ours.apply_chat_template([{"role": "assistant", "content": None}]) == "call;"
    assert ours.apply_chat_template([{"role": "user", "content": "hi"}]) == "said hi;"
    with pytest.raises(ChatTemplateError):
        ours.apply_chat_template([{"role": "user"}])
