"""Content blocks of the Messages API as lines of text, with media among them.

Documents and search results have text. So has what tools on Anthropic's servers returned earlier, and
what was compacted: a conversation that began there goes on here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TypeVar

from ramify.server.anthropic.protocol import Block, Source
from ramify.server.conversation.parts import Line, MediaPart
from ramify.server.errors import ApiError
from ramify.server.prompts.content_placeholders import PLACEHOLDER_NOUNS

# Types of blocks that say nothing to the model.
HIDDEN_TYPES = frozenset(
    "redacted_thinking fallback mcp_tool_listing tool_addition tool_removal browser_state".split()
)
SERVER_CALL_TYPES = frozenset(("server_tool_use", "mcp_tool_use", "toolset_tool_use"))
RESULT_SUFFIX = "_tool_result"  # web_search_tool_result, mcp_tool_result, …

T = TypeVar("T")


def blocks_of(content: str | list[Block] | Block | None) -> list[Block]:
    """Content as a list of blocks."""
    if content is None:
        return []
    if isinstance(content, str):
        return [Block("text", text=content)]
    return content if isinstance(content, list) else [content]


def required(value: T | None, path: str) -> T:
    """A field that must be there.

    Raises:
        ApiError: 400, it is not.
    """
    if value is None:
        raise missing(path)
    return value


def missing(path: str) -> ApiError:
    """The error of a field that must be there, and is not."""
    return ApiError(400, "it is missing", param=path)


def block_lines(block: Block, path: str) -> Iterator[Line]:
    """Yield the lines that a block has in the prompt; none of them is empty.

    Args:
        path: of the block in the request.

    Raises:
        ApiError: 400, its type is unknown.
    """
    if block.type == "document":
        yield from _document_lines(block, path)
    elif block.type == "compaction":
        yield from content_lines(block.content, f"{path}.content")
    elif block.type == "search_result" or block.type.endswith(RESULT_SUFFIX):
        yield from _result_lines(block, path)
    elif block.type in PLACEHOLDER_NOUNS:
        yield MediaPart(path, block.type)
    elif text := _block_text(block, path):
        yield text


def _block_text(block: Block, path: str) -> str:
    if block.type == "text":
        return required(block.text, f"{path}.text")
    if block.type in HIDDEN_TYPES:
        return ""
    if block.type in SERVER_CALL_TYPES:
        arguments = json.dumps(block.input or {}, ensure_ascii=False)
        return f"[called {block.name or 'a tool'}: {arguments}]"
    if block.type == "tool_reference":
        return f"[tool: {block.tool_name or ''}]"
    raise ApiError(
        400,
        f"blocks of type {block.type!r} are not served by this model; send text",
        param=f"{path}.type",
    )


def content_lines(content: str | list[Block] | Block | None, path: str) -> Iterator[Line]:
    """Yield the lines of blocks; see `block_lines`."""
    if isinstance(content, str):
        if content:
            yield content
        return
    for index, block in enumerate(blocks_of(content)):
        yield from block_lines(block, f"{path}[{index}]")


def _document_lines(block: Block, path: str) -> Iterator[Line]:
    """Yield title, context and text of a document; media in place of a file or a link."""
    yield from (text for text in (block.title, block.context) if text)
    source = block.source
    if isinstance(source, Source) and source.type == "text":
        if data := required(source.data, f"{path}.source.data"):
            yield data
    elif isinstance(source, Source) and source.type == "content":
        yield from content_lines(source.content, f"{path}.source.content")
    else:
        yield MediaPart(path, block.type)


def _result_lines(block: Block, path: str) -> Iterator[Line]:
    """Yield the lines of a result: its own, then those of its content.

    The parts of a server's result have types of their own, as `code_execution_result`. They are as
    deep as JSON may be nested.
    """
    source = block.source if isinstance(block.source, str) else None
    for text in (block.title, block.url, source, block.text, block.stdout, block.stderr):
        if text:
            yield text
    if block.error_code:
        yield f"error: {block.error_code}"
    parts = [*blocks_of(block.content), *(block.tool_references or ())]
    for index, part in enumerate(parts):
        where = f"{path}.content[{index}]"
        if part.type == "tool_reference" or part.type in PLACEHOLDER_NOUNS:
            yield from block_lines(part, where)
        else:
            yield from _result_lines(part, where)
