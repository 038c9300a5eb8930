"""Parameters, errors, pins and results of calls, in a form that travels."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import msgspec
from msgspec import Raw, Struct

from ramify import errors
from ramify.cache.content_atoms import Salt
from ramify.cache.key import CacheKey
from ramify.cache.pins import Pin
from ramify.cache.types import CacheStats
from ramify.cluster.wire import RemoteError, WireError
from ramify.engine.cache_admin import calls
from ramify.engine.cache_admin.branch_view import BranchView
from ramify.engine.cache_admin.view import ClearResult, TreeView
from ramify.engine.context import EngineStats
from ramify.errors import InvalidParamsError, RamifyError
from ramify.outputs import Explanation
from ramify.params import FreeText, SamplingParams, StructuredOutput

_DEFAULTS = SamplingParams()
_NAMES = tuple(field.name for field in fields(SamplingParams))
_FORMAT_NAMES = tuple(field.name for field in fields(StructuredOutput))
_FREE_TEXT_NAMES = tuple(field.name for field in fields(FreeText))
_encoder = msgspec.msgpack.Encoder()


def encode_params(params: SamplingParams) -> dict[str, Any]:
    """The parameters that are not at their defaults, by name."""
    values = {
        name: value
        for name in _NAMES
        if (value := getattr(params, name)) != getattr(_DEFAULTS, name)
    }
    if "logit_bias" in values:
        values["logit_bias"] = params.biases
    if params.structured is not None:
        structured = params.structured
        values["structured"] = {
            name: value
            for name in _FORMAT_NAMES
            if name != "free_text" and (value := getattr(structured, name))
        }
        if (free := structured.free_text) is not None:
            values["structured"]["free_text"] = {
                name: getattr(free, name) for name in _FREE_TEXT_NAMES
            }
    return values


def decode_params(values: Mapping[str, Any]) -> SamplingParams:
    """The parameters of `encode_params`.

    Raises:
        RequestError: a name is unknown, or a value is none that it can have.
    """
    named = dict(values)
    structured = named.get("structured")
    try:
        if structured is not None:
            named["structured"] = _decode_format(structured)
        return SamplingParams(**named)
    except (TypeError, AttributeError, ValueError) as error:
        if isinstance(error, RamifyError):
            raise
        raise InvalidParamsError(
            "params", sorted(named), f"those of SamplingParams: {error}"
        ) from None


def _decode_format(values: Any) -> StructuredOutput:
    named = dict(values)
    free = named.pop("free_text", None)
    if free is not None:
        free = FreeText(**{name: _as_tuples(value) for name, value in dict(free).items()})
    return StructuredOutput(**named, free_text=free)


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


# -- errors ----------------------------------------------------------------------------------

_PLAIN = (str, int, float, type(None))
_OF_EXCEPTIONS = frozenset(dir(BaseException))  # such as `args`, which takes no number


def encode_error(error: BaseException) -> RemoteError:
    """An exception by the name of its class, its text, and those of its attributes that are plain."""
    known = next(
        (kind for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind), None
    )
    attributes = {name: value for name, value in vars(error).items() if isinstance(value, _PLAIN)}
    return RemoteError("" if known is None else known.__name__, str(error), attributes)


def decode_error(remote: RemoteError) -> RamifyError:
    """The exception of `encode_error`; a StepFailedError if its class is none of Ramify's."""
    kind = getattr(errors, remote.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, RamifyError)):
        return errors.StepFailedError(remote.message)
    # Its own constructor takes what only the other side knows.
    error = kind.__new__(kind)
    error.args = (remote.message,)
    for name, value in remote.attributes.items():
        if isinstance(value, _PLAIN) and not name.startswith("_") and name not in _OF_EXCEPTIONS:
            setattr(error, name, value)
    return error


# -- results of calls ------------------------------------------------------------------------


class WirePin(Struct, frozen=True, array_like=True):
    """A `Pin`; ids of media and salts within its prefix are 0. The last two: of a replica that sends them."""

    id: int
    owner: str
    token_ids: bytes
    num_pages: int
    ttl_s: float | None
    expires_s: float
    namespace: bytes = b""
    salts: list[tuple[int, bytes]] = []

    @classmethod
    def of(cls, pin: Pin) -> WirePin:
        """The travelling form of a pin."""
        ids = array("i", [max(0, token) for token in pin.key.tokens()])
        salts = [(at, atom.salt) for at, atom in pin.key.marks if atom.salt is not None]
        return cls(
            pin.id,
            pin.owner,
            ids.tobytes(),
            pin.num_pages,
            pin.ttl_s,
            pin.expires_s,
            pin.key.namespace,
            salts,
        )

    def pin(self) -> Pin:
        """The pin; what its key has in place of media and of the first token with a salt is not the same."""
        return Pin(
            self.id,
            self.owner,
            CacheKey(self.token_ids, self.namespace, salts=[Salt(*salt) for salt in self.salts]),
            self.num_pages,
            self.ttl_s,
            self.expires_s,
        )


_RESULTS: dict[type, Any] = {
    calls.ReadStats: EngineStats,
    calls.ReadCacheStats: CacheStats,
    calls.CheckCache: None,
    calls.Explain: Explanation,
    calls.ExplainToTenant: Explanation | None,
    calls.EvictAnswers: None,
    calls.ReadTree: TreeView,
    calls.ReadBranches: BranchView,
    calls.ClearCache: ClearResult,
    calls.PinPrefix: WirePin,
    calls.Unpin: None,
    calls.UnpinPrefix: int,
    calls.ListPins: list[WirePin],
    calls.EndPins: int,
    calls.EndSession: int | None,
    calls.PinPublicPrefixes: None,
}
_decoders = {kind: msgspec.msgpack.Decoder(result) for kind, result in _RESULTS.items()}


def encode_result(value: Any) -> Raw:
    """The result of a call as msgpack."""
    if isinstance(value, Pin):
        value = WirePin.of(value)
    elif isinstance(value, list):
        value = [WirePin.of(entry) if isinstance(entry, Pin) else entry for entry in value]
    return Raw(_encoder.encode(value))


def decode_result(call: Any, value: Raw) -> Any:
    """The result of a call, from `encode_result`.

    Raises:
        WireError: it is none that this call can have.
    """
    try:
        result = _decoders[type(call)].decode(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"the result of {type(call).__name__} is broken: {error}") from error
    if isinstance(result, WirePin):
        return result.pin()
    if isinstance(call, calls.ListPins):
        return [entry.pin() for entry in result]
    return result


def pack_floats(values: array[float]) -> bytes:
    """float32 values, little-endian."""
    packed = values[:]
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_floats(packed: bytes) -> array[float]:
    """The values of `pack_floats`.

    Raises:
        WireError: the bytes are no whole number of values.
    """
    if len(packed) % 4:
        raise WireError(f"{len(packed)} bytes are no whole number of values of 4 bytes")
    values = array("f", packed)
    if sys.byteorder == "big":
        values.byteswap()
    return values
