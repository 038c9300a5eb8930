"""Several answers to one prompt (n > 1), and steps that verify drafts."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.engine.request import Request
from ramify.engine.speculation.drafter import accepts_drafts, max_drafts
from ramify.outputs import FinishReason
from ramify.testing import fake_next_token
from tests.budget import examples
from tests.pure.engine_bench import VOCAB, Bench, expected

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def drawn(prompt: list[int], seed: int, count: int) -> list[int]:
    """Tokens that a sampled request with this seed draws alone."""
    context = list(prompt)
    while len(context) < len(prompt) + count:
        context.append(fake_next_token(context, VOCAB, draw=(seed, len(context))))
    return context[len(prompt) :]


@dataclass
class Guesser:
    """A drafter of up to `longest` tokens, each right with probability `share`."""

    share: float
    longest: int
    rng: random.Random = field(default_factory=lambda: random.Random(7))

    def propose(self, running: Sequence[Request]) -> Iterator[tuple[Request, tuple[int, ...]]]:
        for request in running:
            if accepts_drafts(request):
                yield request, self.guess(request, max_drafts(request))

    def verified(self, request: Request, num_accepted: int) -> None:
        assert 0 <= num_accepted <= len(request.draft)

    def guess(self, request: Request, limit: int) -> tuple[int, ...]:
        context = request.sequence.tokens.tolist()
        guesses: list[int] = []
        for _ in range(min(limit, self.rng.randrange(self.longest + 1))):
            right = self.rng.random() < self.share
            draw = (request.seed, len(context)) if request.params.temperature else None
            token = fake_next_token(context, VOCAB, draw=draw)
            context.append(token if right else self.rng.randrange(VOCAB))
            guesses.append(context[-1])
        return tuple(guesses)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("pool_tokens", [4096, 64])
def test_each_answer_is_that_of_a_request_with_its_own_seed(
    page_size: int, pool_tokens: int
) -> None:
    """Answer i equals that of a request with seed + i, also when pages or rows run short."""
    bench = Bench(pool_tokens, page_size, max_num_seqs=3)
    first = bench.add(PROMPT, n=5, temperature=1.0, seed=40, max_tokens=9, ignore_eos=True)
    other = bench.add(PROMPT[:7], max_tokens=9, ignore_eos=True)

    outputs = bench.run()

    answers = [list(completion.token_ids) for completion in outputs[first].completions]
    assert answers == [drawn(PROMPT, 40 + index, 9) for index in range(5)]
    assert outputs[first].usage.completion_tokens == 45
    assert list(outputs[other].token_ids) == expected(PROMPT[:7], 9, ends=())
    bench.assert_nothing_leaked()


def test_a_prompt_is_computed_once_for_all_its_answers() -> None:
    """n answers compute their prompt once; its last, partial page is copied."""
    bench = Bench(page_size=16)
    bench.add(PROMPT, n=8, temperature=1.0, seed=1, max_tokens=3, ignore_eos=True)

    bench.run()

    assert bench.core.num_computed_tokens == len(PROMPT) + 8 * 2


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_an_abort_ends_all_answers(num_steps: int) -> None:
    """An abort ends every answer: before the prompt is computed, part-way, or waiting for a row."""
    bench = Bench(max_num_seqs=2, max_batch_tokens=6)
    request_id = bench.add(PROMPT, n=4, temperature=1.0, seed=3, max_tokens=30, ignore_eos=True)
    for _ in range(num_steps):
        bench.step()

    bench.abort(request_id)

    reasons = {completion.finish_reason for completion in bench.outputs[request_id].completions}
    assert reasons == {FinishReason.ABORT}
    assert len(bench.outputs[request_id].completions) == 4
    bench.assert_nothing_leaked()


def test_all_answers_fail_with_a_prompt_that_does() -> None:
    """If the prompt's step fails, every answer ends with an error."""
    bench = Bench(fail_at=range(4))
    request_id = bench.add(PROMPT, n=3, max_tokens=4)

    outputs = bench.run()

    assert [completion.finish_reason for completion in outputs[request_id].completions] == [
        "error"
    ] * 3
    assert "failed" in str(outputs[request_id].error)
    bench.assert_nothing_leaked()


@settings(max_examples=examples(40), deadline=None)
@given(
    page_size=st.sampled_from([1, 2, 4, 16]),
    share=st.sampled_from([0.0, 0.6, 1.0]),
    longest=st.integers(1, 20),
    pool_tokens=st.sampled_from([96, 4096]),
    budget=st.sampled_from([5, 512]),
    seed=st.integers(0, 99),
)
def test_guesses_change_no_token(
    page_size: int, share: float, longest: int, pool_tokens: int, budget: int, seed: int
) -> None:
    """Right and wrong drafts change no token, across page borders and when pages run out."""
    bench = Bench(
        pool_tokens,
        page_size,
        max_batch_tokens=budget,
        drafter=Guesser(share, longest, random.Random(seed)),
    )
    first = bench.add(PROMPT, max_tokens=30, ignore_eos=True)
    branched = bench.add(PROMPT, n=3, temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)
    text = bench.add(PROMPT[2:], max_tokens=25)

    outputs = bench.run()

    assert list(outputs[first].token_ids) == expected(PROMPT, 30, ends=())
    answers = [list(completion.token_ids) for completion in outputs[branched].completions]
    assert answers == [drawn(PROMPT, 5 + index, 20) for index in range(3)]
    assert list(outputs[text].token_ids) == expected(PROMPT[2:], 25)
    bench.assert_nothing_leaked()


def test_right_guesses_save_steps() -> None:
    """Accepted drafts yield several tokens of a request in one step."""
    bench = Bench(drafter=Guesser(1.0, 4))
    bench.add(PROMPT, max_tokens=60, ignore_eos=True)

    bench.run()

    assert bench.core.num_steps < 40


@pytest.mark.parametrize("stop", ["AB", "CDE"])
def test_text_that_may_begin_a_stop_text_is_told_later(stop: str) -> None:
    """Text that may start a stop string is held back, and never sent if it is the stop string."""
    script = [ord(letter) - ord("A") for letter in "ZCZCDZZAZCDE"]
    bench = Bench(next_token=lambda context: script[len(context) - 3])
    request_id = bench.add([1, 2, 3], max_tokens=12, stop=[stop], ignore_eos=True)

    pieces: list[str] = []
    while bench.core.has_unfinished:
        pieces += [event.text for event in bench.step()]

    text = "".join(map(chr, (ord("A") + token for token in script)))
    assert "".join(pieces) == text.partition(stop)[0] == bench.outputs[request_id].text


def test_a_request_whose_first_answer_has_ended_can_be_aborted() -> None:
    """A request stays live, and can be aborted, until all its answers have ended."""
    bench = Bench(next_token=lambda context: 7, drafter=Guesser(0.0, 1))
    request_id = bench.add(PROMPT, n=3, max_tokens=30, ignore_eos=True)
    for _ in range(4):
        bench.step()
    leader = bench.core.lifecycle.requests[request_id]
    leader.max_len = len(leader.sequence.tokens) + 1  # it ends first, as one with a stop text may
    bench.step()
    assert leader.is_finished

    bench.abort(request_id)

    reasons = [completion.finish_reason for completion in bench.outputs[request_id].completions]
    assert reasons == [FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ABORT]
    bench.assert_nothing_leaked()
