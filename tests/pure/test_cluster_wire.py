"""Messages between server and replica: what travels arrives, and nothing broken is taken."""

from array import array
from typing import Any

import msgspec
import pytest

from ramify import errors
from ramify.cache import CacheKey
from ramify.cache.pins import Pin
from ramify.cluster import wire
from ramify.cluster.codecs import (
    decode_error,
    decode_params,
    decode_result,
    encode_error,
    encode_params,
    encode_result,
)
from ramify.cluster.credentials import Credentials
from ramify.cluster.merging import cluster_id, merged, split_id
from ramify.engine.cache_admin import calls
from ramify.errors import ConfigError, InvalidParamsError, RamifyError, RequestError
from ramify.outputs import CacheReport, FinishReason, RequestMetrics, TokenLogprob
from ramify.params import FreeText, SamplingParams, StructuredOutput
from tests.pure.engine_bench import Bench

PARAMS = [
    SamplingParams(),
    SamplingParams(
        temperature=0.7, top_k=5, top_p=0.5, min_p=0.1, seed=2**62, n=3, max_tokens=None
    ),
    SamplingParams(logit_bias={3: 1.5, 9: -100}, allowed_token_ids=[1, 2], stop=["a", "b"]),
    SamplingParams(banned_sequences=[[1, 2], [3]], stop_token_ids=[4], keep_special_tokens=["<x>"]),
    SamplingParams(structured=StructuredOutput(json_schema={"type": "object"}), logprobs=0),
    SamplingParams(structured=StructuredOutput(choice=["yes", "no"]), prompt_logprobs=2),
    SamplingParams(structured=StructuredOutput(json_object=True), ignore_eos=True),
    SamplingParams(
        structured=StructuredOutput(
            grammar='start: "a"',
            free_text=FreeText(
                triggers=(("<call>", 7), ("x",)),
                resumes=True,
                ignored=(((3,),), ((4, "b"),)),
                starts_ignored=True,
            ),
        )
    ),
    SamplingParams(max_tokens=0, prompt_embedding=True, pooling="mean"),
]


@pytest.mark.parametrize("params", PARAMS, ids=range(len(PARAMS)))
def test_parameters_arrive_as_they_were(params: SamplingParams) -> None:
    """Every parameter, with nested formats, is equal at the other side."""
    message = wire.Add(1, b"", encode_params(params))

    arrived = wire.decode_from_server(wire.encode(message))

    assert isinstance(arrived, wire.Add)
    assert decode_params(arrived.params) == params


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": "hot"},
        {"no_such": 1},
        {"structured": 5},
        {"structured": {"regex": 5}},
        {"structured": {"json_object": True, "free_text": {"triggers": 5}}},
        {"structured": {"json_object": True, "free_text": {"no": 1}}},
        {"logit_bias": [1, 2]},
        {"n": 10**30},
        {"stop": {"a": 1}},
    ],
    ids=str,
)
def test_wrong_parameters_refuse_the_request_alone(values: dict[str, Any]) -> None:
    """They raise what the engine raises for a request, which ends no connection."""
    with pytest.raises((RequestError, ConfigError)):
        decode_params(values)


def test_token_ids_are_packed() -> None:
    """Ids of any sequence come back as an array; others are refused."""
    ids = [0, 1, 2**31 - 1]

    assert wire.unpack_ids(wire.pack_ids(ids)).tolist() == ids
    assert wire.unpack_ids(wire.pack_ids(array("i", ids))).tolist() == ids
    for wrong in ([2**31], ["a"], [1.5]):
        with pytest.raises(wire.WireError):
            wire.pack_ids(wrong)  # type: ignore[arg-type]
    with pytest.raises(wire.WireError, match="5 bytes"):
        wire.unpack_ids(b"12345")


ERRORS: list[RamifyError] = [
    errors.PromptTooLongError(9, 5),
    errors.OverloadedError(3, 2, 4.5),
    errors.TokensWaitError(1, 2, 3, 0.5),
    errors.InvalidParamsError("n", 0, "more"),
    errors.TokenOutOfRangeError(5, 2, 4),
    errors.DrainingError(2.0),
    errors.PinError("no"),
    errors.StepFailedError("broken"),
    errors.UnknownRequestError(7),
    errors.EmptyPromptError(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_arrives_as_the_exception_that_it_was(error: RamifyError) -> None:
    """Class, text and numbers are those of the other side."""
    body = wire.encode(wire.Return(1, error=encode_error(error)))
    message = wire.decode_from_replica(body)
    assert isinstance(message, wire.Return)
    assert message.error is not None

    arrived = decode_error(message.error)

    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    for name in ("num_tokens", "limit", "retry_after_s", "name", "token", "position"):
        assert getattr(arrived, name, None) == getattr(error, name, None)


def test_a_foreign_error_is_a_failure_of_the_engine() -> None:
    """A bug, or a class that is no error of ours, cannot name a class to make."""
    for kind in ("ValueError", "os", "shortened", "", "__builtins__"):
        assert type(decode_error(wire.RemoteError(kind, "text"))) is errors.StepFailedError
    assert str(decode_error(encode_error(ZeroDivisionError("by 0")))) == "by 0"


def test_results_of_calls_arrive() -> None:
    """Each call's result has the type that its caller expects."""
    core = Bench().core
    core.add_request([*range(3, 20)], SamplingParams(max_tokens=1))
    while core.has_unfinished:
        core.step()
    requests: list[Any] = [
        calls.ReadStats(),
        calls.ReadCacheStats(),
        calls.CheckCache(),
        calls.Explain([*range(3, 20)]),
        calls.ExplainToTenant([*range(3, 20)], "a"),
        calls.PinPrefix([*range(3, 20)], "me", 5.0, "", "", 0),
        calls.ListPins(),
        calls.ReadTree(5),
        calls.UnpinPrefix("me", [*range(3, 20)], "ann", "s"),
        calls.EndPins("me"),
        calls.EvictAnswers([*range(3, 20)], [[1]], 0),
        calls.ClearCache(),
    ]
    for call in requests:
        message = wire.decode_from_server(wire.encode(wire.Call(1, call)))
        assert isinstance(message, wire.Call)
        assert message.call == call
        result = call(core)

        arrived = decode_result(call, encode_result(result))

        if isinstance(result, Pin):
            assert (arrived.id, len(arrived.key), arrived.ttl_s) == (result.id, 16, 5.0)
        elif isinstance(call, calls.ListPins):
            assert [pin.owner for pin in arrived] == ["me"]
        else:
            assert arrived == result


def test_a_wrong_result_is_an_error_of_the_wire() -> None:
    """What a replica may not answer is refused."""
    with pytest.raises(wire.WireError, match="ReadStats"):
        decode_result(calls.ReadStats(), msgspec.Raw(b"\x01"))


def test_results_of_replicas_are_added() -> None:
    """Counts are sums, sizes are not, and ids lead back to their replica."""
    stats = Bench().core.stats()
    pin = Pin(3, "me", CacheKey([1, 2]), 1, None, 0.0)

    total = merged(calls.ReadStats(), [(0, stats), (5, stats)])
    pins = merged(calls.ListPins(), [(0, [pin]), (5, [pin])])

    assert total.cache.num_pages == 2 * stats.cache.num_pages
    assert total.cache.page_size == stats.cache.page_size
    assert len(total.cache.residency.counts) == len(stats.cache.residency.counts)
    assert [split_id(entry.id) for entry in pins] == [(3, 0), (3, 5)]
    assert split_id(cluster_id(8, 1023)) == (8, 1023)


def test_messages_have_a_limit() -> None:
    """A larger message is not sent; a step is cut into several, a single output cannot be."""
    with pytest.raises(wire.WireError, match=r"16,777,216"):
        wire.encode(wire.Add(1, bytes(wire.MAX_MESSAGE_BYTES), {}))
    outputs = [wire.Output(key, [1], "x" * (1 << 20)) for key in range(40)]
    runs = [wire.Run(number, "stored", b"", b"", b"h" * 16) for number in range(2500)]
    step = wire.Step(outputs, [7], runs=runs, digest=(9, b"d" * 16))

    bodies = wire.step_messages(step)

    parts: list[Any] = [wire.decode_from_replica(body) for body in bodies]
    assert max(map(len, bodies)) <= wire.MAX_MESSAGE_BYTES
    assert [output.key for part in parts for output in part.outputs] == [*range(40)]
    assert [run.sequence for part in parts for run in part.runs] == [*range(2500)]
    assert [part.digest for part in parts][-1] == (9, b"d" * 16)
    assert sum(part.digest is not None for part in parts) == 1
    assert [key for part in parts for key in part.accepted] == [7]
    with pytest.raises(wire.WireError):
        wire.step_messages(wire.Step([wire.Output(1, [], "x" * wire.MAX_MESSAGE_BYTES)]))


def test_an_end_that_is_too_large_is_an_error_of_its_request() -> None:
    """Others in the step get their outputs; one with too many log probabilities ends with an error."""
    logprobs = [TokenLogprob(1, -0.5, dict.fromkeys(range(20), -0.5))] * 80_000
    end = wire.End(
        [FinishReason.LENGTH], [None], RequestMetrics(0.0, None, 0.0, None), CacheReport(0, 0, 0)
    )
    large = msgspec.structs.replace(end, prompt_logprobs=logprobs)
    step = wire.Step([wire.Output(1, [3], end=end), wire.Output(2, [4], end=large)])

    arrived: list[Any] = [wire.decode_from_replica(body) for body in wire.step_messages(step)]

    outputs = {output.key: output for part in arrived for output in part.outputs}
    assert outputs[1].end == end
    failed = outputs[2].end
    assert failed is not None and failed.error is not None
    assert failed.prompt_logprobs is None
    error = decode_error(failed.error)
    assert isinstance(error, InvalidParamsError)
    assert error.name == "prompt_logprobs"


def test_events_of_many_pages_travel_in_several_messages() -> None:
    """Runs that are too large for one are divided; one that no message holds is a gap, and is counted."""
    name = b"n" * 16
    large = wire.Run(1, "removed", name, name, bytes(wire.MAX_MESSAGE_BYTES // 3))
    runs = [msgspec.structs.replace(large, sequence=at) for at in range(1, 6)]
    runs[3] = msgspec.structs.replace(runs[3], hashes=bytes(wire.MAX_MESSAGE_BYTES + 16))
    step = wire.Step([wire.Output(1, [3])], [7], runs=runs, digest=(5, name))

    arrived: list[Any] = [wire.decode_from_replica(body) for body in wire.step_messages(step)]

    assert arrived[0].outputs == step.outputs
    assert arrived[0].accepted == [7]
    assert [run.sequence for part in arrived for run in part.runs] == [1, 2, 3, 5]
    assert sum(part.num_lost for part in arrived) == 1
    assert [part.digest for part in arrived if part.digest] == [(5, name)]
    assert arrived[-1].digest == (5, name)


def test_credentials() -> None:
    """A secret is compared whole, is long enough, and is needed where others can connect."""
    shown = Credentials(secret="0123456789abcdef")

    assert shown.is_authentic([("ramify-secret", "0123456789abcdef")])
    for metadata in ([], [("ramify-secret", "0123456789abcdeF")], [("ramify-secret", b"x")]):
        assert not shown.is_authentic(metadata)
    assert Credentials().is_authentic([])
    Credentials().check_address("127.0.0.1")
    Credentials().check_address("[::1]")
    shown.check_address("0.0.0.0")
    with pytest.raises(ConfigError, match="everybody who can reach it"):
        Credentials().check_address("0.0.0.0")
    with pytest.raises(ConfigError, match="at least 16"):
        Credentials(secret="short")
    for secret in ("0123456789abcdef\n0123456789abcdef", "0123456789abcdef é"):
        with pytest.raises(ConfigError, match="printable ASCII"):
            Credentials(secret=secret)
    assert "0123456789abcdef" not in repr(shown)
    with pytest.raises(ConfigError, match="key and authority are missing"):
        Credentials(certificate=b"x")
