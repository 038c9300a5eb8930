"""Content blocks of the Messages API as text of the prompt.

Documents and search results have text. So has what tools on Anthropic's servers returned earlier, and
what was compacted: a conversation that began there goes on here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TypeVar

from ramify.server.anthropic.protocol import Block, Source
from ramify.server.errors import ApiError
from ramify.server.prompts.content_placeholders import content_placeholder

# Types of blocks that say nothing to the model.
HIDDEN_TYPES = frozenset(
    "redacted_thinking fallback mcp_tool_listing tool_addition tool_removal browser_state".split()
)
SERVER_CALL_TYPES = frozenset(("server_tool_use", "mcp_tool_use", "toolset_tool_use"))
RESULT_SUFFIX = "_tool_result"  # web_search_tool_result, mcp_tool_result, …

T = TypeVar("T")
Unserved = list[tuple[str, str]]  # path and type of the blocks that became placeholders


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
        raise ApiError(400, "it is missing", param=path)
    return value


def block_text(block: Block, path: str, unserved: Unserved) -> str:
    """The text of a block in the prompt; "" for one that says nothing to the model.

    Args:
        path: of the block in the request.
        unserved: is extended by the blocks that became placeholders.

    Raises:
        ApiError: 400, its type is unknown.
    """
    if block.type == "text":
        return required(block.text, f"{path}.text")
    if block.type in HIDDEN_TYPES:
        return ""
    if block.type == "document":
        return _document_text(block, path, unserved)
    if block.type in SERVER_CALL_TYPES:
        arguments = json.dumps(block.input or {}, ensure_ascii=False)
        return f"[called {block.name or 'a tool'}: {arguments}]"
    if block.type == "tool_reference":
        return f"[tool: {block.tool_name or ''}]"
    if block.type == "compaction":
        return content_text(block.content, f"{path}.content", unserved)
    if block.type == "search_result" or block.type.endswith(RESULT_SUFFIX):
        return "\n".join(_result_texts(block, path, unserved))
    placeholder = content_placeholder(block.type)
    if placeholder is None:
        raise ApiError(
            400,
            f"blocks of type {block.type!r} are not served by this model; send text",
            param=f"{path}.type",
        )
    unserved.append((path, block.type))
    return placeholder


def content_text(content: str | list[Block] | Block | None, path: str, unserved: Unserved) -> str:
    """The texts of blocks, joined by newlines; see `block_text`."""
    if isinstance(content, str):
        return content
    texts = [
        block_text(block, f"{path}[{index}]", unserved)
        for index, block in enumerate(blocks_of(content))
    ]
    return "\n".join(text for text in texts if text)


def _document_text(block: Block, path: str, unserved: Unserved) -> str:
    """Title, context and text of a document; a placeholder for a file or a link."""
    lines = [text for text in (block.title, block.context) if text]
    source = block.source
    if isinstance(source, Source) and source.type == "text":
        lines.append(required(source.data, f"{path}.source.data"))
    elif isinstance(source, Source) and source.type == "content":
        lines.append(content_text(source.content, f"{path}.source.content", unserved))
    else:
        unserved.append((path, block.type))
        lines.append(content_placeholder(block.type) or "")
    return "\n".join(lines)


def _result_texts(block: Block, path: str, unserved: Unserved) -> Iterator[str]:
    """Yield the texts of a result: its own, then those of its content.

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
        if part.type in ("document", "tool_reference") or content_placeholder(part.type):
            yield block_text(part, where, unserved)
        else:
            yield from _result_texts(part, where, unserved)
