"""Handler of POST /v1/weights: replace the weights while requests are served."""

from __future__ import annotations

import logging
import time
from typing import Annotated

from msgspec import Meta, Struct
from starlette.responses import Response

from ramify.errors import ConfigError, ModelError, ReplicaLostError, RolloutError
from ramify.server.context import RequestContext
from ramify.server.errors import ApiError
from ramify.server.http.wire import json_response
from ramify.server.prefixes.pages import share_again

logger = logging.getLogger(__name__)


class WeightsRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/weights."""

    # A directory, GGUF file or hub model of the same architecture, sizes and vocabulary.
    model: Annotated[str, Meta(min_length=1, max_length=4096)]


async def replace(context: RequestContext) -> Response:
    """POST /v1/weights; answers when they are in use, and goes on if the client leaves."""
    request = await context.body(WeightsRequest)
    begin_s = time.monotonic()
    try:
        await context.service.engine.reload_weights(request.model)
    except (ModelError, ConfigError, RolloutError, ReplicaLostError) as error:
        logger.error("the weights of %s are not in use: %s", request.model, error)
        is_refused = isinstance(error, ModelError | ConfigError)
        raise ApiError(400 if is_refused else 503, str(error), param="model") from error
    await share_again(context.service)
    seconds = time.monotonic() - begin_s
    logger.info("the weights of %s are in use after %.1f s", request.model, seconds)
    return json_response({"model": request.model, "seconds": round(seconds, 3)})
