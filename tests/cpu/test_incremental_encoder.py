"""Incremental tokenisation of a growing text equals tokenising it from scratch."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.engine.text.incremental_encoder import IncrementalEncoder
from ramify.engine.text.tokenizer import Tokenizer
from ramify.models.checkpoint.find import find_checkpoint
from ramify.testing import write_tiny_checkpoint
from tests.budget import examples

PIECES = st.one_of(
    st.sampled_from(
        ["<|end|>", "<|user|>", "<|assistant|>", "<|bos|>", "\n", " ", "the", "é", "😀", "<|", "|>"]
    ),
    st.text(max_size=6),
).filter(lambda text: text.isprintable() or text == "\n")


@pytest.fixture(scope="module", params=["ramify-tiny", "random"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    if request.param == "ramify-tiny":
        path = find_checkpoint("ramify-tiny")
    else:
        path = write_tiny_checkpoint(Path(tmp_path_factory.mktemp("tiny")), "llama")
    return Tokenizer.load(path)


@settings(max_examples=examples(200), deadline=None)
@given(
    turns=st.lists(st.lists(PIECES, max_size=6), max_size=8), limit=st.sampled_from([0, 200, 10**6])
)
def test_any_growing_text_has_the_tokens_of_one_from_scratch(
    tokenizer: Tokenizer, turns: list[list[str]], limit: int
) -> None:
    """Ids and end offsets equal a fresh encoding, whatever the encoder's memory has dropped."""
    encoder, text = IncrementalEncoder(tokenizer, max_tokens=limit), ""
    for turn in turns:
        text += "".join(turn)
        encoding = encoder.encode(text)
        ids, ends = tokenizer.encode_with_offsets(text)
        assert (encoding.ids, encoding.end_offsets) == (ids, ends)


def test_only_the_new_part_of_a_chat_is_tokenised(tokenizer: Tokenizer) -> None:
    """Encoding restarts at the last special token before the text differs."""
    encoder = IncrementalEncoder(tokenizer)
    start = "<|bos|><|system|>" + "Be brief. " * 500 + "<|end|>"
    encoder.encode(start + "<|user|>Hello<|end|><|assistant|>")
    before = encoder.num_encoded

    encoder.encode(
        start + "<|user|>Hello<|end|><|assistant|>Hi.<|end|><|user|>More<|end|><|assistant|>"
    )

    assert encoder.num_encoded - before < 100


def test_several_threads_may_encode(tokenizer: Tokenizer) -> None:
    """Each gets the tokens of its own text, whatever the others make the encoder forget."""
    encoder = IncrementalEncoder(tokenizer, max_tokens=600)

    def grow(tenant: str) -> bool:
        text = ""
        for turn in range(40):
            text += f"<|user|>{tenant} {turn % 7}<|end|>"
            encoding = encoder.encode(text, tenant)
            if (encoding.ids, encoding.end_offsets) != tokenizer.encode_with_offsets(text):
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(grow, "abcd"))
    assert sum(encoder._lengths.values()) == len(encoder._remembered)
