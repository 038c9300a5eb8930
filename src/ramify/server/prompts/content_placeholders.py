"""Placeholders in the prompt for content that a text model cannot read: images, audio, files.

All APIs write the same placeholder, so that a conversation with an image in its history goes on. Models
that read images, of which only the text decoder is loaded, refuse them instead: clients expect an answer
about the image.
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


def placeholder_warnings(
    blocks: Iterable[tuple[str, str]], *, wrapper: str | None = None
) -> list[str]:
    """Warnings for the client: one for each kind of content that became a placeholder.

    Args:
        blocks: path and `type` of blocks; types without a placeholder are skipped.
        wrapper: architecture of a model that reads images or audio, of which only the text decoder is
            loaded; None: a text model.

    Raises:
        ApiError: 400, there is content that the whole of `wrapper` might read.
    """
    first_paths: dict[str, str] = {}
    counts: dict[str, int] = {}
    for path, block_type in blocks:
        noun = PLACEHOLDER_NOUNS.get(block_type)
        if noun in MEDIA_NOUNS and wrapper is not None:
            raise ApiError(
                400,
                f"{noun} content is not served: of {wrapper} only the text decoder is loaded; send text",
                param=path,
            )
        if noun is not None:
            first_paths.setdefault(noun, path)
            counts[noun] = counts.get(noun, 0) + 1
    return [
        f"{noun} content is not served by this model, the prompt has a placeholder: "
        f"{path}{f' and {counts[noun] - 1} more' if counts[noun] > 1 else ''}"
        for noun, path in first_paths.items()
    ]
