"""Options of `ramify serve` and `ramify replica` that publish what the cache holds."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from ramify.errors import ConfigError

if TYPE_CHECKING:
    from ramify.server.kv_events.options import KvEventOptions

PANEL = "KV events"


class Form(str, Enum):
    """How an event is written."""

    map = "map"
    array = "array"


Endpoint = Annotated[
    str | None,
    typer.Option(
        "--kv-events",
        metavar="ENDPOINT",
        help="Publish what the cache stores and removes, as vLLM does, at tcp://HOST:PORT. Whoever "
        "connects reads the tokens of every prompt.",
        rich_help_panel=PANEL,
    ),
]
Replay = Annotated[
    str | None,
    typer.Option(
        "--kv-events-replay",
        metavar="ENDPOINT",
        help="Send missed events again at tcp://HOST:PORT, or the whole cache where they are too old.",
        rich_help_panel=PANEL,
    ),
]
Topic = Annotated[
    str | None,
    typer.Option(
        "--kv-events-topic",
        help="First frame of each message; llm-d reads kv@POD@MODEL.",
        rich_help_panel=PANEL,
    ),
]
EventsForm = Annotated[
    Form,
    typer.Option(
        "--kv-events-form",
        help="`map` for readers of vLLM 0.24 and later, `array` for those of SGLang and older vLLM.",
        rich_help_panel=PANEL,
    ),
]
Tiers = Annotated[
    bool,
    typer.Option(
        "--kv-events-tiers",
        help="Publish what goes to the cache tiers and leaves them, too, for readers that tell one medium "
        "from another: CPU, DISK, EXTERNAL.",
        rich_help_panel=PANEL,
    ),
]


def kv_event_options(
    endpoint: str | None, replay: str | None, topic: str | None, form: Form, tiers: bool
) -> KvEventOptions | None:
    """What to publish where; None: nothing.

    Raises:
        ConfigError: an option is given without --kv-events, or an endpoint cannot be bound.
        MissingPackageError: pyzmq is not installed.
    """
    if endpoint is None:
        given = {
            "--kv-events-replay": replay,
            "--kv-events-topic": topic,
            "--kv-events-form": None if form is Form.map else form.value,
            "--kv-events-tiers": tiers or None,
        }
        for flag, value in given.items():
            if value is not None:
                raise ConfigError(
                    f"{flag} {value!r} is for events that are published; give --kv-events "
                    "tcp://HOST:PORT too, or leave it out"
                )
        return None
    from ramify.server.kv_events.form import EventForm
    from ramify.server.kv_events.options import KvEventOptions

    return KvEventOptions(endpoint, replay or "", topic or "", EventForm(form.value), tiers)
