"""What the clients send. A seed is of one round: new prompts in each, the same for every server."""

from __future__ import annotations

from dataclasses import dataclass

from servers.chats import Chats, CountTokens, conversations, questions
from servers.contract import MODEL

DOCUMENT_TOKENS = 2_100
QUESTIONS = 8
RATE = 4  # requests a second


@dataclass(frozen=True, slots=True)
class Cell:
    """A table: `vllm bench serve` with `options`, or, where there are none, chats by OpenAI's SDK."""

    name: str
    title: str
    num_requests: int
    num_new: int
    options: tuple[str, ...] = ()
    has_offline: bool = True  # the engine alone can be given the same requests
    after: str = ""  # runs right after this cell, on its seed

    @property
    def has_bound(self) -> bool:
        """Whether all requests start at once with nothing cached, as a roofline assumes."""
        return self.has_offline and not self.after

    def arguments(self, seed: int, url: str, tokenizer: str) -> list[str]:
        """Arguments of `vllm bench serve`."""
        return [
            "--backend", "openai", "--endpoint", "/v1/completions", "--base-url", url,
            "--model", MODEL, "--tokenizer", tokenizer, "--seed", str(seed),
            "--num-prompts", str(self.num_requests), "--temperature", "0", "--ignore-eos",
            "--save-detailed", "--disable-tqdm", *self.options,
        ]  # fmt: skip

    def seed(self, repetition: int) -> int:
        """The seed of a round; cells that do not build on each other share no prompt."""
        return 1_000 * (repetition + 1) + sorted(CELLS).index(self.after or self.name)

    def chats(self, seed: int, count_tokens: CountTokens) -> Chats:
        """What the SDK's users write."""
        if self.name == "conversations":
            return conversations(
                seed, count_tokens, system_tokens=512, users=8, num_messages=3, num_new=self.num_new
            )
        return questions(
            seed,
            count_tokens,
            num_tokens=DOCUMENT_TOKENS,
            count=QUESTIONS,
            num_new=self.num_new,
            first=1 + QUESTIONS if self.after else 1,
        )


def repeated_prefixes(num_new: int, prefix_len: int, suffix_len: int) -> tuple[str, ...]:
    """Options of the dataset prefix_repetition, with four prefixes."""
    return (
        "--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", "4",
        "--prefix-repetition-prefix-len", str(prefix_len),
        "--prefix-repetition-suffix-len", str(suffix_len),
        "--prefix-repetition-output-len", str(num_new),
    )  # fmt: skip


CELLS = {
    cell.name: cell
    for cell in (
        Cell(
            "prefixes",
            "prefix_repetition: 64 requests on 4 prefixes of 1,024 tokens, 64 tokens of their own, 32 new, "
            "all sent at once",
            64, 32, repeated_prefixes(32, 1_024, 64),
        ),
        Cell(
            "rate", f"prefix_repetition: 32 such requests, {RATE} a second",
            32, 32, (*repeated_prefixes(32, 1_024, 64), "--request-rate", str(RATE)),
            has_offline=False,
        ),
        Cell(
            "random", "random: 12 requests of 512 tokens, nothing shared, 32 new, all sent at once",
            12, 32,
            ("--dataset-name", "random", "--random-input-len", "512", "--random-output-len", "32"),
        ),
        Cell(
            "questions", "OpenAI's SDK: 8 questions at once about a document of 2,100 tokens, 128 new",
            QUESTIONS, 128,
        ),
        Cell(
            "questions-again", "OpenAI's SDK: 8 other questions about the same document",
            QUESTIONS, 128, after="questions",
        ),
        Cell(
            "conversations",
            "OpenAI's SDK: 8 users who write 3 messages each behind a system prompt of 512 tokens, 32 new",
            24, 32, has_offline=False,
        ),
    )
}  # fmt: skip
# Off the clock, after a server has started.
WARM_UP = Cell("warm-up", "", 16, 16, repeated_prefixes(16, 256, 32))
WARM_UP_SEED = 7


def warm_up_chats(count_tokens: CountTokens) -> Chats:
    """The same of the SDK."""
    return questions(WARM_UP_SEED, count_tokens, num_tokens=200, count=4, num_new=16)


def in_order(names: list[str]) -> list[Cell]:
    """The cells of these names as they run, with those that they build on."""
    wanted = {*names, *(CELLS[name].after for name in names)}
    return [cell for cell in CELLS.values() if cell.name in wanted]
