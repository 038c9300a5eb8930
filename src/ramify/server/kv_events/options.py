"""What to publish of a cache, and where."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ramify.errors import ConfigError, MissingPackageError
from ramify.server.kv_events.form import EventForm

ENDPOINT = re.compile(r"tcp://(\*|\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+):(\d{1,5}|\*)|ipc://\S+")
LOOPBACK = ("tcp://127.", "tcp://localhost:", "tcp://[::1]:", "ipc://")


@dataclass(frozen=True, slots=True)
class KvEventOptions:
    """Where events are published.

    Args:
        endpoint: that the publisher binds: tcp://HOST:PORT or ipc://PATH.
        replay: that answers requests for missed batches; "": none.
        topic: the first frame of each message.
        tiers: publish what the cache tiers store and remove, too.

    Raises:
        ConfigError: an endpoint is none that a publisher can bind.
        MissingPackageError: pyzmq is not installed.
    """

    endpoint: str
    replay: str = ""
    topic: str = ""
    form: EventForm = EventForm.map
    tiers: bool = False

    def __post_init__(self) -> None:
        for flag, value in (("--kv-events", self.endpoint), ("--kv-events-replay", self.replay)):
            if (value or flag == "--kv-events") and not ENDPOINT.fullmatch(value):
                raise ConfigError(
                    f"{flag} {value!r} is no endpoint to bind; give tcp://HOST:PORT or ipc://PATH, such "
                    "as tcp://127.0.0.1:5557, or tcp://*:5557 for all addresses of this machine"
                )
        import_zmq()

    def check_free(self) -> None:
        """Bind the endpoints and release them: errors come before the model loads.

        Raises:
            ConfigError: one cannot be bound.
        """
        zmq = import_zmq()
        context = zmq.Context()
        try:
            for endpoint in filter(None, (self.endpoint, self.replay)):
                bound_socket(context, zmq.PUB, endpoint).close(linger=0)
        finally:
            context.term()

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        return all(
            endpoint.startswith(LOOPBACK) for endpoint in (self.endpoint, self.replay) if endpoint
        )


def bound_socket(context: Any, kind: int, endpoint: str) -> Any:
    """A socket that listens.

    Raises:
        ConfigError: the endpoint cannot be bound.
    """
    made = context.socket(kind)
    made.ipv6 = "[" in endpoint
    try:
        made.bind(endpoint)
    except import_zmq().ZMQError as error:
        made.close(linger=0)
        raise ConfigError(
            f"KV events cannot be published at {endpoint}: {error}; give a free port of this machine"
        ) from error
    return made


def import_zmq() -> Any:
    """The package zmq.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        import zmq
    except ImportError:
        raise MissingPackageError("pyzmq", "kv-events") from None
    return zmq
