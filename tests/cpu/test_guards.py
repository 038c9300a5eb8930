"""Special tokens that users write, beside those of the template: the same ids as if there were none."""

from __future__ import annotations

import random

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from ramify.engine.tokenizer import Tokenizer

CORPUS = ["hello world, foo bar baz | end <user> of it", "the quick brown fox, hello hello"] * 20
PIECES = ("hello", " ", "  ", "\n", "é", "foo bar", "<e", "end>", "a", " fox ")
TEMPLATE = "{% for m in messages %}<user>\n{{ m.content }} <end>\n{% endfor %}<bot> "


def core(kind: str, rng: random.Random) -> tokenizers.Tokenizer:
    """Trained, with the template's tokens, which may take the space around them along."""
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
    """What users write is a token of one tokenizer, and plain text of the other."""
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
            guarded = tokenizer.apply_chat_template(tokenizer.guarded(messages))

            ids, ends = tokenizer.encode_with_ends(guarded)

            assert ids.tolist() == expected.ids
            shown = [guarded[:end].replace("\U0010fffe", "") for end in ends]
            assert shown == [rendered[:end] for _, end in expected.offsets]
