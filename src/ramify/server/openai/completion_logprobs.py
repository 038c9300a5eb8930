"""`logprobs` of the completions endpoint: lists side by side, and texts as the names of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from ramify.engine.text.detokenizer import REPLACEMENT, Detokenizer
from ramify.engine.text.tokenizer import Tokenizer
from ramify.outputs import TokenLogprob
from ramify.server.openai.chat_response import MIN_LOGPROB
from ramify.server.openai.options import token_name
from ramify.server.openai.protocol import Sampling


class CompletionLogprobs:
    """Logprobs of one choice, as its tokens come.

    `text_offset` is where a token begins in the text of the choice, in code points: tokens that
    make up one character begin together, and tokens that are not shown have no length.

    Args:
        num_top: entries of `top_logprobs` for each token.
    """

    def __init__(self, request: Sampling, tokenizer: Tokenizer, num_top: int) -> None:
        self._request, self._tokenizer, self._num_top = request, tokenizer, num_top
        self._num_chars = 0
        self._detokenizer = Detokenizer(tokenizer, request.skip_special_tokens is False)

    def add_prompt(
        self, first_token: int, logprobs: Iterable[TokenLogprob | None], text: str
    ) -> dict[str, Any]:
        """The entries of a prompt that is echoed; its first token has no logprob.

        Args:
            text: of the prompt, in the choice.
        """
        answer, self._detokenizer = self._detokenizer, Detokenizer(self._tokenizer)
        payload = self._entries(first_token, logprobs)
        self._detokenizer, self._num_chars = answer, len(text)
        return payload

    def add(self, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
        """The entries of further tokens of the answer."""
        return self._entries(0, logprobs)

    def _entries(self, first_token: int, logprobs: Iterable[TokenLogprob | None]) -> dict[str, Any]:
        payload: dict[str, Any] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for logprob in logprobs:
            token = first_token if logprob is None else logprob.token_id
            payload["tokens"].append(self._name(token))
            payload["text_offset"].append(self._num_chars)
            self._num_chars += len(self._detokenizer.step(token))
            if logprob is None:
                payload["token_logprobs"].append(None)
                payload["top_logprobs"].append(None)
            else:
                payload["token_logprobs"].append(max(logprob.logprob, MIN_LOGPROB))
                payload["top_logprobs"].append(self._top(logprob))
        return payload

    def _top(self, logprob: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens by name. Of two with one text, the second is named by its id."""
        owners = {
            self._name(logprob.token_id): logprob.token_id
        }  # the token's own name is in `tokens`
        top: dict[str, float] = {}
        for token, value in islice(logprob.top.items(), self._num_top):
            name = self._name(token)
            if owners.setdefault(name, token) != token:
                name = f"token_id:{token}"
            top[name] = max(value, MIN_LOGPROB)
        return top

    def _name(self, token: int) -> str:
        """A token's text; `bytes:` and its bytes for a part of a character, as OpenAI writes them."""
        name = token_name(token, self._request, self._tokenizer)
        if REPLACEMENT not in name:
            return name
        parts = "".join(f"\\x{byte:02x}" for byte in self._tokenizer.token_bytes(token))
        return f"bytes:{parts}"
