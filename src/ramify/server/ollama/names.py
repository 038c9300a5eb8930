"""Model names as Ollama's clients write them: with a tag, `:latest` where there is none."""

from __future__ import annotations

from ramify.server.errors import ApiError
from ramify.server.service import RequestService

LATEST = ":latest"


def tagged(name: str) -> str:
    """A name as it is listed: `smollm2:latest`; one that has a tag as it is."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def check_model(name: str | None, service: RequestService) -> str:
    """The model name for the response to a request: as it was sent.

    Raises:
        ApiError: 400, the request names none; 404, this server has no model of that name, with and
            without the tag.
    """
    if not name:
        raise ApiError(400, "model is required")
    for candidate in (name, name.removesuffix(LATEST)):
        if candidate in service.names:
            return name
    if service.serves_any_name:
        return service.check_model(name)
    raise ApiError(
        404,
        f"model '{name}' not found; this server has {', '.join(map(tagged, service.names))}",
        code="model_not_found",
    )
