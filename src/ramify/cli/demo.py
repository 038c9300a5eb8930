"""One document, many questions, three times: cache off, cold, warm."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

from ramify.engine.llm import LLM
from ramify.errors import ConfigError
from ramify.params import RequestOutput, SamplingParams

MAX_ANSWER_TOKENS = 24
OFF, COLD, WARM = "cache off", "cold", "warm"


@dataclass(frozen=True, slots=True)
class Quiz:
    """A document and questions about it; `answers` are None where nobody knows them."""

    document: str
    questions: tuple[str, ...]
    answers: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """All questions asked at once, one time."""

    name: str
    outputs: tuple[RequestOutput, ...]
    total_s: float

    @property
    def ttft_s(self) -> float:
        """Median time from submission to the first token of an answer."""
        return median(one.metrics.ttft_s or 0.0 for one in self.outputs)

    def tokens(self, kind: str) -> int:
        """Sum of the `read`, `shared` or `computed` prompt tokens."""
        return sum(getattr(one.cache, f"{kind}_tokens") for one in self.outputs)


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The three rounds of a quiz."""

    quiz: Quiz
    rounds: tuple[Round, ...]

    @property
    def same_answers(self) -> bool:
        """Whether every question got the same tokens in every round."""
        return all(
            len({one.outputs[at].token_ids for one in self.rounds}) == 1
            for at in range(len(self.quiz.questions))
        )

    @property
    def num_known(self) -> int:
        """Questions whose right answer is known."""
        return sum(answer is not None for answer in self.quiz.answers)

    @property
    def num_right(self) -> int:
        """Of them, how many the last round answered exactly."""
        texts = (one.text.strip() for one in self.rounds[-1].outputs)
        return sum(a is not None and a == b for a, b in zip(self.quiz.answers, texts, strict=True))

    @property
    def speed_up(self) -> float:
        """Time to first token with the cache off over that with a warm cache."""
        return self.rounds[0].ttft_s / self.rounds[-1].ttft_s

    def to_json(self) -> dict[str, Any]:
        """Everything, for machines."""
        return {
            "questions": [
                {
                    "question": question,
                    "expected": answer,
                    **{one.name: one.outputs[at].text.strip() for one in self.rounds},
                    "right": None
                    if answer is None
                    else self.rounds[-1].outputs[at].text.strip() == answer,
                }
                for at, (question, answer) in enumerate(
                    zip(self.quiz.questions, self.quiz.answers, strict=True)
                )
            ],
            "rounds": [
                {
                    "name": one.name,
                    "median_ttft_s": one.ttft_s,
                    "total_s": one.total_s,
                    **{f"{kind}_tokens": one.tokens(kind) for kind in KINDS},
                    "ttft_s": [output.metrics.ttft_s for output in one.outputs],
                }
                for one in self.rounds
            ],
            "same_answers": self.same_answers,
            "right": self.num_right,
            "known": self.num_known,
            "ttft_speed_up": self.speed_up,
        }


KINDS = ("computed", "read", "shared")


def builtin_quiz() -> Quiz:
    """The document that ships with the package, with its 32 questions and answers."""
    return _from_json(json.loads(files("ramify").joinpath("data/demo.json").read_text("utf-8")))


def load_quiz(path: Path, num_questions: int) -> Quiz:
    """A quiz from a file: JSON like the built-in one, or any text, which is asked about itself.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--document {path} cannot be read as UTF-8 text: {error}") from error
    if path.suffix == ".json":
        try:
            return _from_json(json.loads(text))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"--document {path} must hold document and questions (each with question, and "
                f"answer if it is known): {error!r}"
            ) from error
    subjects = list(dict.fromkeys(re.findall(r"[^\W\d_]{4,}", text)))
    if not subjects:
        raise ConfigError(f"--document {path} has no word of 4 letters to ask about")
    step = max(1, len(subjects) // num_questions)
    asked = subjects[::step][:num_questions]
    questions = tuple(f"What does the document say about {subject}?" for subject in asked)
    return Quiz(text, questions, (None,) * len(questions))


def _from_json(found: dict[str, Any]) -> Quiz:
    entries = list(found["questions"])
    if not entries:
        raise ValueError("there are 0 questions, at least 1 is needed")
    answers = [entry.get("answer") for entry in entries]
    return Quiz(
        str(found["document"]),
        tuple(str(entry["question"]) for entry in entries),
        tuple(None if answer is None else str(answer) for answer in answers),
    )


def run_demo(
    model: str,
    quiz: Quiz,
    options: dict[str, Any],
    on_answer: Callable[[str], None] = lambda name: None,
) -> DemoResult:
    """Ask all questions at once with the cache off, then twice with one that starts empty.

    Args:
        options: of `LLM`; `prefix_cache` is the demo's own to choose.
        on_answer: called with the round's name as each answer is complete.
    """
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
        raise ConfigError("the demo asks in words, but the checkpoint has no tokenizer.json")
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
    return [tokenizer.encode(f"{quiz.document}\n\n{one}\n") for one in quiz.questions]


def _warm_up(llm: LLM, prompts: list[Sequence[int]]) -> None:
    """The first calls into torch are slower; what they leave in the cache goes."""
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
