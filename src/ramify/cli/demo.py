"""`ramify demo`: many questions about one document, with the cache off, cold and warm."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ramify.cli.load import announce_load
from ramify.cli.options import (
    DEFAULT_MODEL,
    MODEL_HELP,
    AsJson,
    engine_options,
    exit_on_error,
    milliseconds,
)
from ramify.counts import counted
from ramify.errors import ConfigError
from ramify.outputs import RequestOutput
from ramify.params import SamplingParams
from ramify.reasons import reason_of

if TYPE_CHECKING:
    from ramify.engine.llm import LLM

MAX_ANSWER_TOKENS = 24
# ramify-tiny looks up facts in made-up sentences; a model that reads English gets a page of a book.
FACTS, PAGE = "demo.json", "alice.json"
OFF, COLD, WARM = "cache off", "cold", "warm"
KINDS = ("computed", "read", "shared")


@dataclass(frozen=True, slots=True)
class Quiz:
    """A document with questions about it; an answer is None where it is not known."""

    document: str
    questions: tuple[str, ...]
    answers: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """All questions of a quiz, answered in one batch."""

    name: str
    outputs: tuple[RequestOutput, ...]
    total_s: float

    @property
    def ttft_s(self) -> float:
        """Median time from submission to the first token of an answer."""
        return median(output.metrics.ttft_s or 0.0 for output in self.outputs)

    def tokens(self, kind: str) -> int:
        """Sum of the `read`, `shared` or `computed` prompt tokens."""
        return sum(getattr(output.cache, f"{kind}_tokens") for output in self.outputs)


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The three rounds of a quiz."""

    quiz: Quiz
    rounds: tuple[Round, ...]

    @property
    def same_answers(self) -> bool:
        """Whether every question got the same tokens in every round."""
        return all(
            len({run.outputs[number].token_ids for run in self.rounds}) == 1
            for number in range(len(self.quiz.questions))
        )

    @property
    def num_known(self) -> int:
        """Questions whose right answer is known."""
        return sum(answer is not None for answer in self.quiz.answers)

    @property
    def num_right(self) -> int:
        """Questions that the last round answered with the known answer, word for word."""
        texts = (output.text.strip() for output in self.rounds[-1].outputs)
        return sum(
            answer is not None and answer == text
            for answer, text in zip(self.quiz.answers, texts, strict=True)
        )

    @property
    def speed_up(self) -> float:
        """Time to first token with the cache off over that with a warm cache."""
        return self.rounds[0].ttft_s / self.rounds[-1].ttft_s

    def to_json(self) -> dict[str, Any]:
        """The questions with their answers, and the rounds with their figures."""
        texts = {run.name: [output.text.strip() for output in run.outputs] for run in self.rounds}
        last = texts[self.rounds[-1].name]
        return {
            "questions": [
                {
                    "question": question,
                    "expected": answer,
                    **{name: answers[number] for name, answers in texts.items()},
                    "right": None if answer is None else last[number] == answer,
                }
                for number, (question, answer) in enumerate(
                    zip(self.quiz.questions, self.quiz.answers, strict=True)
                )
            ],
            "rounds": [
                {
                    "name": run.name,
                    "median_ttft_s": run.ttft_s,
                    "total_s": run.total_s,
                    **{f"{kind}_tokens": run.tokens(kind) for kind in KINDS},
                    "ttft_s": [output.metrics.ttft_s for output in run.outputs],
                }
                for run in self.rounds
            ],
            "same_answers": self.same_answers,
            "right": self.num_right,
            "known": self.num_known,
            "ttft_speed_up": self.speed_up,
        }


def builtin_quiz(model: str) -> Quiz:
    """A document that ships with the package: 32 questions with answers, or 8 for a packaged model."""
    from ramify.models.checkpoint.packaged import PACKAGED_MODELS

    name = PAGE if model in PACKAGED_MODELS else FACTS
    return _from_json(json.loads(files("ramify").joinpath("data", name).read_text("utf-8")))


def load_quiz(path: Path, num_questions: int) -> Quiz:
    """A quiz from a file: JSON like the built-in one, or any text, which is asked about itself.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--document {path} cannot be read: {reason_of(error, path)}") from error
    if path.suffix == ".json":
        try:
            return _from_json(json.loads(text))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"--document {path} must hold document and questions (each with question, and "
                f"answer if it is known): {reason_of(error)}"
            ) from error
    words = list(dict.fromkeys(re.findall(r"[^\W\d_]{4,}", text)))
    if not words:
        raise ConfigError(f"--document {path} has no word of 4 letters to ask about")
    subjects = words[:: max(1, len(words) // num_questions)][:num_questions]
    questions = tuple(f"What does the document say about {subject}?" for subject in subjects)
    return Quiz(text, questions, (None,) * len(questions))


def _from_json(quiz: dict[str, Any]) -> Quiz:
    entries = list(quiz["questions"])
    if not entries:
        raise ValueError("there are 0 questions, at least 1 is needed")
    answers = [entry.get("answer") for entry in entries]
    return Quiz(
        str(quiz["document"]),
        tuple(str(entry["question"]) for entry in entries),
        tuple(None if answer is None else str(answer) for answer in answers),
    )


def run_demo(
    model: str,
    quiz: Quiz,
    options: dict[str, Any],
    on_answer: Callable[[str], None] = lambda name: None,
) -> DemoResult:
    """Ask all questions in one batch: cache off, then cold, then warm.

    Args:
        options: options of `LLM`; the demo sets `prefix_cache` itself.
        on_answer: called with the round's name when an answer is complete.
    """
    from ramify.engine.llm import LLM

    params = SamplingParams(max_tokens=MAX_ANSWER_TOKENS)
    without = LLM(model, **options | {"prefix_cache": False})
    prompts = _prompts(without, quiz)
    _warm_up(without, prompts)
    rounds = [_ask(OFF, without, prompts, params, on_answer)]
    del without
    llm = LLM(model, **options | {"prefix_cache": True})
    _warm_up(llm, prompts)
    for name in (COLD, WARM):
        rounds.append(_ask(name, llm, prompts, params, on_answer))
    llm.cache.check()
    return DemoResult(quiz, tuple(rounds))


def _prompts(llm: LLM, quiz: Quiz) -> list[Sequence[int]]:
    """Document first, question last: through the chat template if there is one."""
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise ConfigError(
            "the demo asks in words, but the checkpoint has no tokenizer (tokenizer.json, or that of a GGUF file)"
        )
    if tokenizer.has_chat_template:
        return [
            tokenizer.encode_chat(
                [
                    {"role": "system", "content": quiz.document},
                    {"role": "user", "content": question},
                ]
            )
            for question in quiz.questions
        ]
    return [tokenizer.encode(f"{quiz.document}\n\n{question}\n") for question in quiz.questions]


def _warm_up(llm: LLM, prompts: list[Sequence[int]]) -> None:
    """Make the first, slower calls into torch, then clear the cache."""
    llm.generate([prompts[0][:8]], SamplingParams(max_tokens=2))
    llm.cache.clear()


def _ask(
    name: str,
    llm: LLM,
    prompts: list[Sequence[int]],
    params: SamplingParams,
    on_answer: Callable[[str], None],
) -> Round:
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, on_finished=lambda output: on_answer(name))
    for output in outputs:
        if output.error is not None:
            raise output.error
    return Round(name, tuple(outputs), time.perf_counter() - start)


@engine_options("dtype", "page_size", "max_batch_tokens", "ops", "attention_backend", "exact")
def demo(
    engine: dict[str, Any],
    model: Annotated[str, typer.Option("--model", help=MODEL_HELP)] = DEFAULT_MODEL,
    document: Annotated[
        Path | None, typer.Option(help="A text to ask about, or JSON like the built-in quiz.")
    ] = None,
    num_questions: Annotated[
        int, typer.Option(min=1, help="Number of questions about a text of your own.")
    ] = 32,
    as_json: AsJson = False,
) -> None:
    """Ask 32 questions about one document: cache off, cold, warm. smollm2 gets 8 about a page of a book.

    Exit code 0 means that all three rounds gave the same answers, 1 that they did not.
    """
    with exit_on_error():
        quiz = builtin_quiz(model) if document is None else load_quiz(document, num_questions)
        announce_load(model, engine)
        with _progress(3 * len(quiz.questions)) as advance:
            result = run_demo(model, quiz, engine, advance)
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=2, ensure_ascii=False))
    else:
        _print_demo(result)
    raise typer.Exit(0 if result.same_answers else 1)


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """Show a progress bar on stderr, or one line per round where stderr is not a terminal."""
    from rich.console import Console

    from ramify.engine.offline import rich_bar

    console = Console(stderr=True)
    if not console.is_terminal:
        rounds: set[str] = set()

        def announce(name: str) -> None:
            if name not in rounds:
                rounds.add(name)
                typer.echo(f"asking: {name}", err=True)

        yield announce
        return
    with rich_bar(console, total, f"{'loading':>10}", transient=True) as advance:
        yield lambda name: advance(description=f"{name:>10}")


def _print_demo(result: DemoResult) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    answers = Table(box=None, title="Answers", title_justify="left")
    any_wrong = result.num_right < result.num_known
    for heading in ("", "question", "answer", *(["right answer"] if any_wrong else [])):
        answers.add_column(heading)
    outputs = result.rounds[-1].outputs
    for question, answer, output in zip(
        result.quiz.questions, result.quiz.answers, outputs, strict=True
    ):
        text = output.text.strip()
        mark = " " if answer is None else "✓" if text == answer else "✗"
        answers.add_row(mark, question, text, *([answer or ""] if any_wrong else []))
    console.print(answers, markup=False)
    rounds = Table(box=None, title="\nPrompt tokens and time", title_justify="left")
    rounds.add_column("round")
    for heading in (*KINDS, "TTFT (median)", "all answers"):
        rounds.add_column(heading, justify="right")
    for run in result.rounds:
        counts = [f"{run.tokens(kind):,}" for kind in KINDS]
        rounds.add_row(run.name, *counts, milliseconds(run.ttft_s), milliseconds(run.total_s))
    console.print(rounds)
    num = len(result.quiz.questions)
    if result.num_known:
        console.print(f"\nRight answers: {result.num_right} of {result.num_known}.")
    same = "the same tokens" if result.same_answers else "NOT the same tokens"
    console.print(f"All three rounds gave {same} for all {counted(num, 'question')}.")
    console.print(
        f"Warm, the first token comes {result.speed_up:.1f}x sooner than without a cache."
    )
