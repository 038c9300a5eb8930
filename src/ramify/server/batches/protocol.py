"""Bodies of requests to `/v1/batches` and `/v1/messages/batches`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ramify.server.openai.protocol import Metadata

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * 24 * 3600
ExpirySeconds = Annotated[int, Meta(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)]


class ExpiresAfter(msgspec.Struct):
    """When a file is removed: so many seconds after its making."""

    anchor: Literal["created_at"]
    seconds: ExpirySeconds


class BatchRequest(msgspec.Struct):
    """`POST /v1/batches`."""

    input_file_id: Annotated[str, Meta(max_length=256)]
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


CustomId = Annotated[
    str,
    Meta(
        pattern=r"^[a-zA-Z0-9_-]{1,64}$",
        description="A custom_id has 1 to 64 characters: ASCII letters, digits, _ and -",
    ),
]


class MessageBatchItem(msgspec.Struct):
    """A request of a message batch; `params` is what `POST /v1/messages` gets."""

    custom_id: CustomId
    params: msgspec.Raw


class MessageBatchRequest(msgspec.Struct):
    """`POST /v1/messages/batches`."""

    requests: list[msgspec.Raw]
