"""Model names as Ollama's clients write them: with a tag, `:latest` where there is none."""

from __future__ import annotations

from ramify.server.errors import ApiError
from ramify.server.service import LATEST, RequestService


def tagged(name: str) -> str:
    """A name as it is listed: `smollm2:latest`; one that has a tag as it is."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def check_model(name: str | None, service: RequestService) -> str:
    """The model name for the response to a request: as it was sent.

    Raises:
        ApiError: 400, the request names none; 404, this server has no model of that name, in the words
            by which clients know to offer a pull.
    """
    if not name:
        raise ApiError(400, "model is required")
    try:
        return service.check_model(name)
    except ApiError as error:
        names = ", ".join(map(tagged, service.names))
        message = f"model '{name}' not found; this server has {names}"
        raise ApiError(error.status, message, code=error.code) from None
