"""Content that a text model cannot read: images, audio, video, files.

An image of the turn that is to be answered is refused: an answer would be about what the model has not
seen. Elsewhere the prompt has a placeholder, the same in all APIs: results of calls are images when a tool of
an agent returns one, and a client sends them again in every later turn, as it does with the turns that
another model has answered. An error there would end the conversation.
"""

from __future__ import annotations

from collections.abc import Iterable

from ramify.server.errors import ApiError

# `type` of a content block in any of the APIs → the noun in its placeholder.
PLACEHOLDER_NOUNS = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "computer_screenshot": "image",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
    "video_url": "video",
    "input_video": "video",
    "file": "file",
    "input_file": "file",
    "container_upload": "file",
    "document": "document",
}
MEDIA_NOUNS = ("image", "audio", "video")


def content_placeholder(block_type: str) -> str | None:
    """The text that stands for a block in the prompt; None if blocks of this type have none."""
    noun = PLACEHOLDER_NOUNS.get(block_type)
    return None if noun is None else f"[{noun}: not served by this model]"


def media_refusal(path: str, block_type: str, *, model: str, wrapper: str | None) -> ApiError:
    """The error for an image, audio or video that an answer would have to be about.

    Args:
        path: of the block in the request.
        model: the name by which the request calls it.
        wrapper: architecture of a model that reads images or audio, of which only the text decoder is
            loaded; None: a text model.
    """
    reads = f"the model {model!r} reads text only"
    if wrapper is not None:
        reads = f"of {wrapper} only the text decoder is loaded"
    noun = PLACEHOLDER_NOUNS[block_type]
    message = f"{noun} content is not served: {reads}; say in words what it shows, or leave it out"
    return ApiError(400, message, param=path)


def placeholder_warnings(blocks: Iterable[tuple[str, str]]) -> list[str]:
    """Warnings for the client: one for each kind of content that became a placeholder.

    Args:
        blocks: path and `type` of blocks; types without a placeholder are skipped.
    """
    first_paths: dict[str, str] = {}
    counts: dict[str, int] = {}
    for path, block_type in blocks:
        noun = PLACEHOLDER_NOUNS.get(block_type)
        if noun is not None:
            first_paths.setdefault(noun, path)
            counts[noun] = counts.get(noun, 0) + 1
    return [
        f"{noun} content is not served by this model, the prompt has a placeholder: "
        f"{path}{f' and {counts[noun] - 1} more' if counts[noun] > 1 else ''}"
        for noun, path in first_paths.items()
    ]
