"""Preempting a tenant's requests for another's changes no bit of any answer."""

from ramify.engine.llm import LLM
from ramify.outputs import RequestOutput
from ramify.params import SamplingParams

PROMPTS = ["The violin is in the attic.", "Mara has four lamps, and", "Rome", "Paris is", "A", "B"]
TENANTS = ["ann", "ann", "ann", "ann", "bob", "eve"]


def answers(fair_wait_steps: int) -> tuple[list[RequestOutput], int]:
    llm = LLM("ramify-tiny", max_num_seqs=2, kv_cache_tokens=2048, fair_wait_steps=fair_wait_steps)
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=7, logprobs=2, ignore_eos=True)
    requests = []
    for prompt, tenant in zip(PROMPTS, TENANTS, strict=True):
        requests.append(llm.add_request(prompt, params, tenant=tenant))
        llm.step()
    while llm.has_unfinished():
        llm.step()
    outputs = [llm.take_output(request_id) for request_id in requests]
    return [output for output in outputs if output is not None], llm.stats().num_fair_preemptions


def test_answers_are_bit_identical_with_and_without_fair_rows() -> None:
    """Tokens and logprobs of every request, those that were preempted included."""
    unfair, no_preemptions = answers(0)
    fair, num_preemptions = answers(2)

    assert no_preemptions == 0
    assert num_preemptions > 0
    assert len(fair) == len(unfair) == len(PROMPTS)
    for expected, output in zip(unfair, fair, strict=True):
        assert output.token_ids == expected.token_ids
        assert output.logprobs == expected.logprobs
