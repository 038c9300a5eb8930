"""Messages between server and replica: msgpack arrays over one bidirectional gRPC stream.

The server opens a stream and sends `Hello`; the replica answers `Welcome`, or `Refused` and ends the
stream. Then both send messages of their union until one of them ends the stream. A replica sends one
`Step` for each step of its engine, with everything that the step changed.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from ramify.config import ResolvedConfig
from ramify.engine.cache_admin import calls
from ramify.engine.description import EngineDescription
from ramify.engine.identity import EngineIdentity
from ramify.errors import RamifyError
from ramify.outputs import CacheReport, FinishReason, PrefixReport, RequestMetrics, TokenLogprob

PROTOCOL_VERSION = 5
METHOD = "/ramify.cluster.Replica/Link"
MAX_MESSAGE_BYTES = 16 << 20
MAX_UNSENT_BYTES = 8 << 20  # of one connection; beyond, it is ended
MAX_RUNS = 1000  # of pages in one message
MAX_ANSWERS = 128  # of one request
MAX_CALLS = 256  # of one connection that run at once; a server lets the others wait
PING_S = 1.0
DEAD_S = 5.0  # without any message: the other side is taken for dead

Text = Annotated[str, Meta(max_length=4096)]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0, le=3600)]  # finite, and no NaN
PackedIds = bytes  # int32, little-endian


class WireError(RamifyError):
    """A message is broken, too large, or not allowed here; its stream ends."""


class RemoteError(Struct, frozen=True, array_like=True):
    """An exception: its class in `ramify.errors`, its text and its plain attributes."""

    kind: Text
    message: str
    attributes: dict[str, Any] = {}


# -- from the server -------------------------------------------------------------------------


class Hello(Struct, frozen=True, array_like=True, tag=0):
    """The first message of a stream. What is given must be equal at the replica."""

    protocol_version: int
    page_size: int | None = None
    tokenizer_digest: Text | None = None


class AddOptions(Struct, frozen=True, array_like=True):
    """`RequestOptions`, but for `generated`."""

    priority: int = 0
    tenant: str = ""
    salt: str = ""
    max_shared: int | None = None
    explain: bool = False
    retention: list[tuple[int, float | None]] = []
    cache_share: float | None = None
    pin_share: float | None = None
    session: str = ""


class Add(Struct, frozen=True, array_like=True, tag=1):
    """Queue a request. `Step` answers with its key in `accepted` or `refused`."""

    key: Count  # of the request, chosen by the server, never used twice on a connection
    token_ids: PackedIds
    params: dict[str, Any]  # see `codecs.encode_params`
    options: AddOptions = AddOptions()
    generated: Annotated[list[PackedIds], Meta(max_length=MAX_ANSWERS)] = []


class Abort(Struct, frozen=True, array_like=True, tag=2):
    """End a request. With `wants_end`, its last output is still sent."""

    key: Count
    wants_end: bool = False


AnyCall = (
    calls.ReadStats
    | calls.ReadCacheStats
    | calls.CheckCache
    | calls.Explain
    | calls.ExplainToTenant
    | calls.EvictAnswers
    | calls.ReadTree
    | calls.ReadBranches
    | calls.ClearCache
    | calls.PinPrefix
    | calls.Unpin
    | calls.UnpinPrefix
    | calls.ListPins
    | calls.EndPins
    | calls.EndSession
    | calls.PinPublicPrefixes
)


class Call(Struct, frozen=True, array_like=True, tag=3):
    """Run a call in the engine thread; `Return` answers it."""

    key: Count
    call: AnyCall


class Ping(Struct, frozen=True, array_like=True, tag=4):
    """Ask for a sign of life; `Pong` answers it."""

    number: Count


class TakeSnapshot(Struct, frozen=True, array_like=True, tag=5):
    """Ask for all cached pages; `SnapshotPart`s answer it."""

    number: Count  # of this request


class ReplaceWeights(Struct, frozen=True, array_like=True, tag=6):
    """Load other weights, install them when no request is live; `Return` answers it.

    Then the replica ends all its connections: a new one shows the identity of the weights.
    """

    key: Count  # as those of `Call`
    model: Text  # a checkpoint as the replica's machine names it
    expected: Text = ""  # digest of the identity that is to be replaced; "": any


FromServer = Hello | Add | Abort | Call | Ping | TakeSnapshot | ReplaceWeights

# -- from the replica ------------------------------------------------------------------------


class Welcome(Struct, frozen=True, array_like=True, tag=0):
    """The answer to a `Hello` that is accepted."""

    protocol_version: int
    incarnation: Count
    version: Text  # of Ramify
    identity: EngineIdentity
    namespace: bytes  # the base of cache namespaces
    tokenizer_digest: Text | None
    config: ResolvedConfig
    description: EngineDescription


class Refused(Struct, frozen=True, array_like=True, tag=1):
    """The stream ends, for this reason."""

    reason: str


class End(Struct, frozen=True, array_like=True):
    """The end of a request: its `RequestOutput` without what the increments had."""

    finish_reasons: list[FinishReason]  # by answer
    stop_reasons: list[str | int | None]
    metrics: RequestMetrics
    cache: CacheReport
    prompt_logprobs: list[TokenLogprob | None] | None = None
    prompt_embedding: bytes | None = None  # float32, little-endian
    error: RemoteError | None = None


class Output(Struct, frozen=True, array_like=True, omit_defaults=True):
    """A `StepOutput`."""

    key: Count
    token_ids: list[int]
    text: str = ""
    index: Count = 0
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] = []
    cache: CacheReport | None = None
    prefix: PrefixReport | None = None
    end: End | None = None


class Load(Struct, frozen=True, array_like=True):
    """What a replica has to do, and how fast it is."""

    tokens_waiting: Count  # to compute before a new prompt: of the queue and of running prompts
    num_waiting: Count
    num_running: Count  # answers
    free_pages: Count  # without evicting: those with nothing, and those that can be evicted
    token_s: Seconds  # to compute one token of a prompt; 0: not measured yet
    step_s: Seconds  # of a step that only decodes; 0: not measured yet
    max_waiting: Count = 0  # answers that may wait; 0: no limit


class Run(Struct, frozen=True, array_like=True):
    """A `CacheEvent`: a change of consecutive pages."""

    sequence: Count
    kind: Text
    namespace_hash: bytes
    parent_hash: bytes
    hashes: bytes  # 16 bytes each
    start: int = 0  # pages before the first
    reason: Text = ""


class Step(Struct, frozen=True, array_like=True, tag=2):
    """Everything that changed since the last message."""

    outputs: list[Output] = []
    accepted: list[Count] = []
    refused: list[tuple[Count, RemoteError]] = []
    load: Load | None = None
    runs: list[Run] = []
    num_lost: int = 0  # events that were dropped before `runs`: take a snapshot
    digest: tuple[Count, bytes] | None = None  # sequence, and XOR of all page hashes then


class Return(Struct, frozen=True, array_like=True, tag=3):
    """The result of a `Call` or `ReplaceWeights`, or its error."""

    key: Count
    value: Raw = Raw(b"\xc0")  # nil
    error: RemoteError | None = None


class Pong(Struct, frozen=True, array_like=True, tag=4):
    """The answer to a `Ping`."""

    number: Count


class SnapshotPart(Struct, frozen=True, array_like=True, tag=5):
    """Some of all cached pages, parents first."""

    request: Count  # number of the `TakeSnapshot`
    sequence: Count  # of the last event that the snapshot includes
    number: Count  # of the part, from 0
    runs: Annotated[list[Run], Meta(max_length=MAX_RUNS)]
    is_last: bool
    digest: bytes  # of the whole snapshot


class Draining(Struct, frozen=True, array_like=True, tag=6):
    """The replica takes no more requests, and finishes those that it has."""

    retry_after_s: float
    is_update: bool = False  # it ends this connection, and takes requests again with other weights


FromReplica = Welcome | Refused | Step | Return | Pong | SnapshotPart | Draining


def _plain(value: object) -> object:
    """Arrays of token ids as lists."""
    if isinstance(value, array):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} does not travel")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_from_server = msgspec.msgpack.Decoder(FromServer)
_from_replica = msgspec.msgpack.Decoder(FromReplica)


def encode(message: FromServer | FromReplica) -> bytes:
    """The bytes of a message.

    Raises:
        WireError: it is larger than a message may be, or has a value that does not travel.
    """
    try:
        body = _encoder.encode(message)
    except (OverflowError, TypeError, ValueError, RecursionError) as error:
        raise WireError(f"a {type(message).__name__} cannot be sent: {error}") from error
    if len(body) > MAX_MESSAGE_BYTES:
        raise WireError(
            f"a {type(message).__name__} of {len(body):,} bytes, but a message has at most "
            f"{MAX_MESSAGE_BYTES:,}; send less at once"
        )
    return body


def decode_from_server(body: bytes) -> FromServer:
    """The message of a server.

    Raises:
        WireError: it is broken.
    """
    message: FromServer = _decoded(_from_server, body)
    return message


def decode_from_replica(body: bytes) -> FromReplica:
    """The message of a replica.

    Raises:
        WireError: it is broken.
    """
    message: FromReplica = _decoded(_from_replica, body)
    return message


def _decoded(decoder: msgspec.msgpack.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise WireError(f"a message of {len(body):,} bytes is broken: {error}") from error


def pack_ids(token_ids: Iterable[int]) -> PackedIds:
    """Token ids as little-endian int32.

    Raises:
        WireError: an id is no int32.
    """
    try:
        packed = token_ids if isinstance(token_ids, array) else array("i", token_ids)
    except (TypeError, OverflowError) as error:
        raise WireError(f"token ids must be integers below 2**31: {error}") from error
    if sys.byteorder == "big":
        packed = packed[:]
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(packed: PackedIds) -> array[int]:
    """The token ids of `pack_ids`.

    Raises:
        WireError: the bytes are no whole number of ids.
    """
    if len(packed) % 4:
        raise WireError(f"{len(packed)} bytes are no whole number of token ids of 4 bytes")
    ids = array("i", packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def step_messages(step: Step) -> Sequence[bytes]:
    """The bytes of a step, in several messages if it is too large for one.

    A request whose end is too large, by log probabilities of its prompt, ends with an error in its place.
    A run that is too large is left out: the gap in the sequence asks for a snapshot.

    Raises:
        WireError: a single increment is too large.
    """
    runs = step.runs
    if len(runs) > MAX_RUNS:
        parts = [runs[start : start + MAX_RUNS] for start in range(0, len(runs), MAX_RUNS)]
        first = msgspec.structs.replace(step, runs=parts[0], digest=None)
        rest = [Step(runs=part) for part in parts[1:]]
        rest[-1] = msgspec.structs.replace(rest[-1], digest=step.digest)
        return [message for part in (first, *rest) for message in step_messages(part)]
    try:
        return [encode(step)]
    except WireError as error:
        if step.runs:
            others = msgspec.structs.replace(step, runs=[], digest=None)
            return [*step_messages(others), *_run_messages(step.runs, step.digest)]
        if not step.outputs:
            raise
        if len(step.outputs) == 1:
            [output] = step.outputs
            return [encode(msgspec.structs.replace(step, outputs=[_failed(output, error)]))]
    half = len(step.outputs) // 2
    first = msgspec.structs.replace(step, outputs=step.outputs[:half])
    second = Step(outputs=step.outputs[half:])
    return [*step_messages(first), *step_messages(second)]


def _run_messages(runs: list[Run], digest: tuple[int, bytes] | None) -> Sequence[bytes]:
    """The bytes of runs in as many messages as they need, the digest in the last one."""
    try:
        return [encode(Step(runs=runs, digest=digest))]
    except WireError:
        if len(runs) == 1:
            return [encode(Step(num_lost=1, digest=digest))]
    half = len(runs) // 2
    return [*_run_messages(runs[:half], None), *_run_messages(runs[half:], digest)]


def _failed(output: Output, error: WireError) -> Output:
    """An output that is too large for a message, with the error for what makes it so.

    Raises:
        WireError: it is no end of a request.
    """
    if output.end is None:
        raise error
    message = f"the answer does not fit into a message: {error}; ask for fewer log probabilities"
    reasons = [FinishReason.ERROR for _ in output.end.finish_reasons]
    failed = RemoteError("InvalidParamsError", message, {"name": "prompt_logprobs"})
    end = msgspec.structs.replace(
        output.end, finish_reasons=reasons, prompt_logprobs=None, error=failed
    )
    return msgspec.structs.replace(output, finish_reason=FinishReason.ERROR, logprobs=[], end=end)


def address_of(host: str, port: int) -> str:
    """Host and port as gRPC reads them: an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host and host[0] != "[" else f"{host}:{port}"
