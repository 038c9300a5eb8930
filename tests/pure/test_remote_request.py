"""What a request takes of the increments of its replicas: each token once, each end once, or nothing."""

import asyncio
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from ramify.cluster.codecs import decode_error
from ramify.cluster.remote_request import RemoteRequest
from ramify.cluster.wire import End, Output, RemoteError, WireError
from ramify.engine.request_options import RequestOptions
from ramify.engine.serving.streams import LoopDispatcher, OutputCollector
from ramify.errors import NoReplicaError
from ramify.outputs import CacheReport, FinishReason, RequestMetrics, StepOutput
from ramify.params import SamplingParams
from tests.pure.cluster_bench import run

STOP, LENGTH, ERROR = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR


def end(*reasons: FinishReason, **fields: Any) -> End:
    return End(
        [*reasons],
        [None for _ in reasons],
        RequestMetrics(0.0, None, 0.0, None),
        CacheReport(0, 0, 3),
        **fields,
    )


class Reader(OutputCollector):
    """Keeps the deliveries as they come."""

    def __init__(self) -> None:
        super().__init__(LoopDispatcher(asyncio.get_running_loop()), final_only=False)
        self.events: list[StepOutput] = []

    def receive(self, delivery: Any) -> None:
        self.events.append(delivery)


def with_request(check: Callable[[RemoteRequest, Reader], None]) -> None:
    """Call `check` with a request for two answers, in an event loop."""

    async def main() -> None:
        reader = Reader()
        params = SamplingParams(max_tokens=9, n=2, seed=1)
        check(
            RemoteRequest(
                7, reader, array("i", [3, 4, 5]), params, RequestOptions(),
                prompt=None, page_hashes=(), now_s=0.0,
            ),
            reader,
        )  # fmt: skip

    run(main())


def test_tokens_behind_the_end_of_an_answer_count_for_nothing() -> None:
    """An answer that has failed at a dead replica may go on at the next: its reader had its end."""

    def check(request: RemoteRequest, reader: Reader) -> None:
        request.receive(Output(0, [1, 2], "ab", 0, ERROR), 0.0)
        request.receive(Output(0, [5], "x", 1), 0.0)
        request.num_new = 0  # another replica
        request.receive(Output(0, [3], "c", 0), 0.0)
        request.receive(Output(0, [6], "y", 1, LENGTH), 0.0)
        request.receive(Output(0, [4], "d", 0, STOP, end=end(STOP, LENGTH)), 1.0)

        output = reader.events[-1].output
        assert output is not None
        assert [completion.token_ids for completion in output.completions] == [(1, 2), (5, 6)]
        assert [completion.text for completion in output.completions] == ["ab", "xy"]
        assert [completion.finish_reason for completion in output.completions] == [ERROR, LENGTH]
        assert output.usage.completion_tokens == 4
        assert request.num_new == 1
        ends = [event.index for event in reader.events if event.finish_reason is not None]
        assert sorted(ends) == [0, 1]
        assert [token for event in reader.events for token in event.new_token_ids] == [1, 2, 5, 6]

    with_request(check)


def test_the_end_of_a_request_ends_each_of_its_answers() -> None:
    """Also one whose own end did not come; the output comes last."""

    def check(request: RemoteRequest, reader: Reader) -> None:
        request.receive(Output(0, [1], "a", 0), 0.0)
        request.receive(Output(0, [2], "b", 1, end=end(STOP, LENGTH)), 0.0)

        ends = [(event.index, event.finish_reason) for event in reader.events[1:]]
        assert ends == [(0, STOP), (1, LENGTH)]
        assert [event.output is None for event in reader.events] == [True, True, False]
        assert request.is_over

    with_request(check)


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (Output(0, [1], "a", 2), "answer 2 of a request for 2 answers"),
        (Output(0, [1], "a", 0, STOP, end=end(STOP)), "1 finish and 1 stop reasons"),
        (Output(0, [1], "a", 0, STOP, end=end(STOP, STOP, STOP)), "3 finish and 3 stop reasons"),
        (Output(0, [1], "a", end=end(STOP, STOP, prompt_embedding=b"abc")), "3 bytes"),
    ],
    ids=["no such answer", "too few ends", "too many ends", "half a number"],
)
def test_nothing_of_a_wrong_increment_counts(output: Output, words: str) -> None:
    """Else the replica that goes on would get tokens that were never delivered."""

    def check(request: RemoteRequest, reader: Reader) -> None:
        with pytest.raises(WireError, match=words):
            request.receive(output, 0.0)

        assert (request.num_output, request.num_new, reader.events) == (0, 0, [])
        assert not request.is_over
        assert request.message(1).generated == []

    with_request(check)


def test_an_error_has_no_attribute_of_every_exception() -> None:
    """What a peer names `args` or `add_note` is no attribute of ours, and does not raise."""
    error = decode_error(
        RemoteError("NoReplicaError", "none", {"args": 5, "add_note": "x", "retry_after_s": 2.0})
    )

    assert isinstance(error, NoReplicaError)
    assert (error.args, error.retry_after_s) == (("none",), 2.0)
    error.add_note("still a method")
