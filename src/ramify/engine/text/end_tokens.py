"""End tokens that a tokenizer knows: its end of text, and the end of a turn of its chat template."""

from __future__ import annotations

from ramify.engine.text.tokenizer import Tokenizer
from ramify.errors import ChatTemplateError, ChatTemplateLimitError

# Words that no template contains.
QUESTION, ANSWER = "qzneedled", "qzneedlee"
# Templates of this token (harmony) end every part of an answer with the token that ends a turn.
PART_MARK = "<|channel|>"


def end_token_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids of the tokens that end an answer, whatever the files of the model say.

    A model whose files name only the end of a text never stops in a chat, where its template ends
    turns with another token, such as `<|im_end|>` or `<|eot_id|>`.
    """
    return tuple(dict.fromkeys((*tokenizer.eos_token_ids, *_turn_ends(tokenizer))))


def _turn_ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The added token that the template writes behind a question and behind an answer, if one."""
    if not tokenizer.has_chat_template or any(
        PART_MARK in source for source in tokenizer.chat_template_sources
    ):
        return ()
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": ANSWER},
    ]
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    except (ChatTemplateError, ChatTemplateLimitError):  # requests get them
        return ()
    _, _, behind_question = text.partition(QUESTION)
    between, _, behind_answer = behind_question.partition(ANSWER)
    texts = tokenizer.added_token_texts
    ends = [token for token, end in texts.items() if end and between.lstrip().startswith(end)]
    return tuple(token for token in ends if texts[token] in behind_answer)
