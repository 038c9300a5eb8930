"""Random requests, aborts, failed steps and tiny pools with both drafters at work."""

import random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ramify.engine.request import Request
from ramify.engine.speculation.drafter import AdaptiveDrafter
from ramify.outputs import FinishReason
from ramify.testing import fake_next_token
from tests.budget import examples
from tests.pure.engine_bench import Bench

STEMS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7], [2, 7, 1, 8, 2, 8], [1]]
VOCAB = 3  # guesses are right often enough, and wrong often enough
SEEN = {"accepted": 0, "rejected": 0}


def answer(prompt: list[int], seed: int | None, count: int) -> list[int]:
    """Return the answer of an engine without cache and without speculation."""
    context = list(prompt)
    while len(context) < len(prompt) + count:
        draw = None if seed is None else (seed, len(context))
        context.append(fake_next_token(context, VOCAB, draw=draw))
    return context[len(prompt) :]


class Guessing(RuleBasedStateMachine):
    """Every answer equals that of the request alone, and all resources are freed at the end."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 16]),
        pool_tokens=st.sampled_from([64, 96, 2048]),
        budget=st.sampled_from([4, 17, 512]),
        source=st.sampled_from(["tree", "ngram", "auto"]),
        max_draft_tokens=st.sampled_from([1, 4, 15]),
        fails=st.sets(st.integers(0, 60), max_size=4),
    )
    def begin(
        self,
        page_size: int,
        pool_tokens: int,
        budget: int,
        source: str,
        max_draft_tokens: int,
        fails: set[int],
    ) -> None:
        self.bench = Bench(
            pool_tokens,
            page_size,
            max_num_seqs=64,
            max_batch_tokens=budget,
            max_model_len=60,
            speculative=source,
            max_draft_tokens=max_draft_tokens,
            fail_at=fails,
        )
        self.bench.device.vocab_size = VOCAB
        self.requests: dict[int, tuple[list[int], dict[str, Any]]] = {}

    @rule(
        stem=st.sampled_from(STEMS),
        tail=st.lists(st.integers(0, 2), max_size=4),
        max_tokens=st.integers(1, 40),
        seed=st.sampled_from([None, None, 1, 2]),
        n=st.sampled_from([1, 1, 1, 3]),
    )
    def ask(
        self, stem: list[int], tail: list[int], max_tokens: int, seed: int | None, n: int
    ) -> None:
        params: dict[str, Any] = {"max_tokens": max_tokens, "n": n, "ignore_eos": True}
        if seed is not None:
            params |= {"temperature": 1.0, "seed": seed}
        prompt = [*stem, *tail]
        self.requests[self.bench.add(prompt, **params)] = (prompt, params)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.bench.step()

    @precondition(lambda self: self.bench.core.has_unfinished)
    @rule(pick=st.integers(0, 99))
    def abort(self, pick: int) -> None:
        live = sorted(self.bench.tokens.keys() - self.bench.outputs.keys())
        if live:
            self.bench.abort(live[pick % len(live)])

    @rule()
    def forget(self) -> None:
        self.bench.core.cache.clear()

    @invariant()
    def guesses_are_in_order(self) -> None:
        """Between steps no sequence holds drafts, and running requests are below their max_len."""
        if not hasattr(self, "bench"):
            return
        running: list[Request] = self.bench.core.scheduler.running
        for request in running:
            assert request.sequence.num_draft == 0
            assert request.sequence.tokens.tolist() == [*request.prompt_ids, *request.output_ids]
            assert len(request.sequence.tokens) < request.max_len
            assert request.num_accepted_tokens <= request.num_draft_tokens

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        outputs = self.bench.run()
        for request_id, (prompt, params) in self.requests.items():
            for index, completion in enumerate(outputs[request_id].completions):
                seed = params.get("seed")
                num_new = min(params["max_tokens"], 60 - len(prompt))
                expected = answer(prompt, None if seed is None else seed + index, num_new)
                whole = completion.finish_reason is FinishReason.LENGTH
                assert whole or completion.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
                token_ids = list(completion.token_ids)
                assert token_ids == (expected if whole else expected[: len(token_ids)])
        drafter = self.bench.core.drafter
        assert isinstance(drafter, AdaptiveDrafter)
        for counts in drafter.counts.values():
            SEEN["accepted"] += counts.num_accepted
            SEEN["rejected"] += counts.num_drafted - counts.num_accepted
        self.bench.assert_nothing_leaked()


Guessing.TestCase.settings = settings(
    max_examples=examples(20), stateful_step_count=15, deadline=None
)
TestGuessing = Guessing.TestCase


def test_a_long_life_accepts_and_rejects_guesses() -> None:
    """One long fixed run of the machine's rules both accepts and rejects drafts."""
    rng, machine = random.Random(11), Guessing()
    machine.begin(4, 96, 512, "auto", 15, {30, 31, 90})
    before = dict(SEEN)
    for _ in range(60):
        stem, tail = rng.choice(STEMS), [rng.randrange(3) for _ in range(rng.randrange(3))]
        machine.ask(stem, tail, rng.randrange(1, 40), rng.choice([None, None, 1]), 1)
        machine.step(rng.randrange(1, 12))
        machine.guesses_are_in_order()
        if rng.random() < 0.05:
            machine.abort(rng.randrange(9))

    machine.teardown()

    assert SEEN["accepted"] - before["accepted"] > 100
    assert SEEN["rejected"] - before["rejected"] > 100
