"""Special tokens in user text are encoded as plain text, beside the template's real ones."""

from __future__ import annotations

import random

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from ramify.engine.text.tokenizer import Tokenizer

CORPUS = ["hello world, foo bar baz | end <user> of it", "the quick brown fox, hello hello"] * 20
PIECES = ("hello", " ", "  ", "\n", "é", "foo bar", "<e", "end>", "a", " fox ")
TEMPLATE = "{% for m in messages %}<user>\n{{ m.content }} <end>\n{% endfor %}<bot> "


def core(kind: str, rng: random.Random) -> tokenizers.Tokenizer:
    """Return a trained tokenizer whose template tokens may strip the space around them."""
    if kind == "bytes":
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=rng.random() < 0.5)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=320, initial_alphabet=alphabet, show_progress=False
        )
        made.decoder = decoders.ByteLevel()
    else:
        made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
        if kind == "prepend":
            made.normalizer = normalizers.Sequence(
                [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
            )
        else:
            made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind)
        made.decoder = decoders.Metaspace()
        trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>"], show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    for text in ("<user>", "<end>", "<bot>"):
        left, right = rng.random() < 0.4, rng.random() < 0.4
        made.add_special_tokens(
            [tokenizers.AddedToken(text, lstrip=left, rstrip=right, normalized=False)]
        )
    return made


@pytest.mark.parametrize("kind", ["bytes", "first", "always", "never", "prepend"])
def test_the_ids_are_those_of_a_tokenizer_that_has_no_such_token(kind: str) -> None:
    """Escaped user text has the ids of a tokenizer without the special tokens it contains."""
    rng = random.Random(kind)
    for _ in range(12):
        oracle = core(kind, rng)
        ours = tokenizers.Tokenizer.from_str(oracle.to_str())
        ours.add_special_tokens(["<sys>", "☃"])
        tokenizer = Tokenizer(ours, special_tokens={}, chat_templates={"default": TEMPLATE})
        for _ in range(8):
            written = [
                "".join(rng.choices((*PIECES, "<sys>", "☃"), k=rng.randrange(1, 9)))
                for _ in range(rng.randrange(1, 4))
            ]
            messages = [{"role": "user", "content": text} for text in written]
            rendered = tokenizer.apply_chat_template(messages)
            expected = oracle.encode(rendered, add_special_tokens=False)
            guarded = tokenizer.apply_chat_template(tokenizer.escape_special_tokens(messages))

            ids, ends = tokenizer.encode_with_offsets(guarded)

            assert ids.tolist() == expected.ids
            shown = [guarded[:end].replace("\U0010fffe", "") for end in ends]
            assert shown == [rendered[:end] for _, end in expected.offsets]


def unigram(scheme: str, normalizer: str) -> Tokenizer:
    """Return a Unigram tokenizer whose pieces include the texts of its special tokens."""
    pieces = [("<unk>", -9.0), ("<s>", 0.0), ("</s>", 0.0), ("\u2581", -2.0)]
    made = tokenizers.Tokenizer(
        models.Unigram([*pieces, *((letter, -5.0) for letter in "hievl</s>é")], 0)
    )
    if scheme:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    if normalizer == "prepend":
        parts = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        made.normalizer = normalizers.Sequence(parts)
    elif normalizer == "replace":
        made.normalizer = normalizers.Replace("/", "")
    elif normalizer == "nfkc":
        made.normalizer = normalizers.NFKC()
    made.decoder = decoders.Metaspace(prepend_scheme="never")
    made.add_special_tokens(["<s>", "</s>"])
    template = "<s>{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    return Tokenizer(made, special_tokens={}, chat_templates={"default": template})


@pytest.mark.parametrize("scheme", ["", "always", "first", "never"])
@pytest.mark.parametrize("normalizer", ["", "prepend", "replace", "nfkc"])
def test_a_vocabulary_that_has_a_special_tokens_text_makes_none_of_what_is_written(
    scheme: str, normalizer: str
) -> None:
    """User text never becomes a special token, also when the vocabulary has its text as a piece."""
    tokenizer, rng = unigram(scheme, normalizer), random.Random(f"{scheme} {normalizer}")
    signs = ("<s>", "</s>", " ", "\n", "hi", "é", "<", "/s>", "ﬁ")
    texts = ["</s>", "hi</s>evil", "é</s></s>", "<</s>/s>", "hi"]
    texts += ["".join(rng.choices(signs, k=rng.randrange(1, 7))) for _ in range(200)]
    for text in texts:
        ids = tokenizer.encode_chat([{"role": "user", "content": text}])

        assert [at for at, token in enumerate(ids) if token in (1, 2)] == [0, len(ids) - 1], text
        if not (scheme or normalizer or set(text) - set("hievl</s>é")):
            assert tokenizer.decode(ids, skip_special_tokens=False) == f"<s>{text}</s>"
        alone, ends = tokenizer.encode_with_offsets(tokenizer.escape_special_tokens(text))
        assert 1 not in alone
        assert 2 not in alone
        assert list(ends) == sorted(ends)
        assert len(ends) == len(alone)


@pytest.mark.parametrize("texts", [("ab", "bc"), ("[[I]", "[I]"), ("☃☃", "☃"), ("aba", "ba", "a")])
def test_special_tokens_may_overlap(texts: tuple[str, ...]) -> None:
    """Escaping one special token never leaves the text of another."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        ["x"], trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False)
    )
    made.add_special_tokens([text for text in texts if text != "a"])
    tokenizer = Tokenizer(made, special_tokens={}, chat_templates={})
    rng = random.Random(str(texts))
    for _ in range(200):
        text = "".join(rng.choices((*texts, *"abc[I]☃"), k=rng.randrange(1, 6)))

        ids, _ = tokenizer.encode_with_offsets(tokenizer.escape_special_tokens(text))

        assert tokenizer.special_token_ids.isdisjoint(ids), text
        assert tokenizer.decode(ids) == text


def test_many_special_tokens_that_are_written_take_no_longer_each() -> None:
    """Escaping 40,000 special tokens takes linear time; a quadratic version took minutes."""
    tokenizer = unigram("always", "")

    ids, ends = tokenizer.encode_with_offsets(tokenizer.escape_special_tokens("</s>" * 40_000))

    assert len(ids) == len(ends) > 40_000
    assert 2 not in ids
