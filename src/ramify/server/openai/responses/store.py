"""Stored responses: their items, the ids that find them again, and pages of items."""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec

from ramify.server.errors import ApiError
from ramify.server.history.stored_conversation import StoredConversation
from ramify.server.http.json_limits import check_json_limits
from ramify.server.http.wire import whole_number
from ramify.server.openai.responses.protocol import PromptFields
from ramify.server.prompts.renderer import KnownPrefix
from ramify.server.service import RequestService

Item = dict[str, Any]
MAX_REFERENCES = 1024  # of one request
MAX_PAGE, DEFAULT_PAGE = 100, 20
# Of the names of sessions of responses whose client names none.
CHAIN_PREFIX = "responses:"
# An item's id names the response or conversation that holds it, so that no index is needed.
ITEM_ID = re.compile(r"[a-z]{2,5}_([0-9a-f]{32})_[io][0-9]{1,9}")
ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "local_shell_call": "lsh",
    "shell_call": "sh",
    "apply_patch_call": "apc",
    "compaction": "cmp",
}


def item_id(kind: str, owner: str, number: int, *, is_output: bool = False) -> str:
    """The id of an item: `msg_…_o0` is the first output item of the response `resp_…`.

    Args:
        owner: id of the response or conversation that holds it.
    """
    prefix = ID_PREFIXES.get(kind, "item")
    return f"{prefix}_{owner.partition('_')[2]}_{'o' if is_output else 'i'}{number}"


@dataclass(slots=True, eq=False)
class ResponseChain:
    """Responses that continue each other, in one session.

    `is_own`: the session is the chain's, and ends when `last`, the id of the newest response, is
    deleted. Else the client has named it, and ends it.
    """

    session: str
    is_own: bool
    last: str = ""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that a later request may continue or fetch by its id.

    Kept as JSON: a tenth of the memory of objects, and its bytes can be counted.
    """

    packed_input: bytes  # items of the whole conversation before the answer
    packed_body: bytes
    known: tuple[KnownPrefix, ...]  # the prompt with the answer, then without
    delta_lens: array[int]  # characters of each delta that the stream had; empty: no stream
    chain: ResponseChain

    @property
    def body(self) -> msgspec.Raw:
        """The response as the client received it."""
        return msgspec.Raw(self.packed_body)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory."""
        known = sum(prefix.num_bytes for prefix in self.known)
        deltas = sys.getsizeof(self.delta_lens)
        return len(self.packed_input) + len(self.packed_body) + known + deltas

    @property
    def packed_output(self) -> bytes:
        """The items of the answer, as JSON."""
        return bytes(msgspec.json.decode(self.packed_body, type=_Body).output)


class _Body(msgspec.Struct):
    output: msgspec.Raw


class _Named(msgspec.Struct):
    id: str


def items_by_id(packed: bytes) -> dict[str, msgspec.Raw]:
    """The items of a JSON list by their ids, not decoded."""
    names = msgspec.json.decode(packed, type=list[_Named])
    items = msgspec.json.decode(packed, type=list[msgspec.Raw])
    return {named.id: item for named, item in zip(names, items, strict=True)}


def decode_items(packed: bytes, param: str) -> list[Item]:
    """The items of a JSON list that many requests may have written.

    Raises:
        ApiError: 400, they are more than the body of one request may have.
    """
    check_json_limits(packed, what="what is stored", hint="begin a new conversation", param=param)
    return msgspec.json.decode(packed, type=list[Item])


def joined_lists(lists: Iterable[bytes]) -> bytes:
    """Join JSON lists to one; each is without white space around its brackets."""
    return b"[" + b",".join(packed[1:-1] for packed in lists if packed != b"[]") + b"]"


def stored_response(service: RequestService, tenant: str, name: str, param: str) -> StoredResponse:
    """Look up a stored response of this tenant.

    Args:
        param: the request's field, named in the error.

    Raises:
        ApiError: 404, it has expired or was never stored.
    """
    entry = service.history.get(tenant, name)
    if entry is None or not isinstance(entry.response, StoredResponse):
        raise ApiError(
            404,
            f"there is no response {name[:100]!r}; it has expired or was never stored",
            param=param,
        )
    return entry.response


def stored_conversation(
    service: RequestService, tenant: str, name: str, param: str = "conversation_id"
) -> StoredConversation:
    """Look up a conversation of this tenant.

    Raises:
        ApiError: 404, it has expired, was deleted or never created.
    """
    conversation = service.conversations.get(tenant, name)
    if conversation is None:
        raise ApiError(
            404,
            f"there is no conversation {name[:100]!r}; it has expired or was never created",
            param=param,
        )
    return conversation


@dataclass(frozen=True, slots=True)
class EarlierTurns:
    """The history of a request: a response or a conversation, and the items that it refers to.

    Looked up before the prompt is rendered, in the event loop; decoded where it is rendered.
    """

    name: str = ""  # how errors and segments call the items
    response: StoredResponse | None = None
    conversation: StoredConversation | None = None
    references: frozenset[str] = frozenset()  # ids of stored items
    owners: tuple[StoredResponse | StoredConversation, ...] = ()  # of the items that it refers to

    @property
    def session(self) -> str:
        """The session of what is continued; empty if nothing is."""
        if self.conversation is not None:
            return conversation_session(self.conversation.id)
        return "" if self.response is None else self.response.chain.session

    @property
    def known(self) -> tuple[KnownPrefix, ...]:
        """Texts with their token ids, for the prompt to keep."""
        source = self.response or self.conversation
        return () if source is None else source.known

    def packed_items(self) -> bytes:
        """The items before those of the request, as a JSON list."""
        source = self.response or self.conversation
        return b"[]" if source is None else packed_items_of(source)

    def items(self) -> list[Item]:
        """The items before those of the request.

        Raises:
            ApiError: 400, they are too many.
        """
        return decode_items(self.packed_items(), self.name)

    def referenced_items(self) -> dict[str, Item]:
        """The stored items that the request refers to, by their ids.

        Raises:
            ApiError: 400, they are too many.
        """
        items: dict[str, msgspec.Raw] = {}
        sources = [self.response, self.conversation, *self.owners] if self.references else []
        for source in sources:
            if source is not None:
                own = items_by_id(packed_items_of(source))
                items |= {name: own[name] for name in self.references & own.keys()}
        packed = b"[" + b",".join(map(bytes, items.values())) + b"]"
        return dict(zip(items, decode_items(packed, "input"), strict=True))


def conversation_session(name: str) -> str:
    """The session of a conversation's responses."""
    return f"conversation:{name}"


def packed_items_of(source: StoredResponse | StoredConversation) -> bytes:
    """The items of a response, its answer included, or of a conversation, as a JSON list."""
    if isinstance(source, StoredConversation):
        return b"[" + b",".join(source.items.values()) + b"]"
    return joined_lists([source.packed_input, source.packed_output])


def earlier_turns(request: PromptFields, service: RequestService, tenant: str) -> EarlierTurns:
    """Look up the response or conversation that a request continues, and the items it refers to.

    Raises:
        ApiError: 404 if it is not stored; 400 if there are two, or too many references.
    """
    response = conversation = None
    name = ""
    if request.previous_response_id is not None:
        if request.conversation is not None:
            raise ApiError(
                400,
                "previous_response_id and conversation exclude each other; leave one out",
                param="conversation",
            )
        name = "previous_response"
        response = stored_response(
            service, tenant, request.previous_response_id, "previous_response_id"
        )
    elif request.conversation_id is not None:
        name = "conversation"
        conversation = stored_conversation(service, tenant, request.conversation_id, name)
    items = request.input if isinstance(request.input, list) else []
    references = frozenset(
        reference for item in items if (reference := reference_id(item)) is not None
    )
    if len(references) > MAX_REFERENCES:
        raise ApiError(
            400, f"{len(references)} item references; at most {MAX_REFERENCES}", param="input"
        )
    owners = {match[1] for reference in references if (match := ITEM_ID.fullmatch(reference))}
    sources = [_owner(service, tenant, owner) for owner in sorted(owners)]
    return EarlierTurns(
        name,
        response,
        conversation,
        references=references,
        owners=tuple(source for source in sources if source is not None),
    )


def _owner(
    service: RequestService, tenant: str, owner: str
) -> StoredResponse | StoredConversation | None:
    """What holds the items with this part of an id."""
    entry = service.history.get(tenant, f"resp_{owner}")
    if entry is not None and isinstance(entry.response, StoredResponse):
        return entry.response
    return service.conversations.get(tenant, f"conv_{owner}")


def reference_id(item: Mapping[str, Any]) -> str | None:
    """The id that an item refers to; None if it is an item itself."""
    kind, name = item.get("type"), item.get("id")
    is_reference = kind == "item_reference" or (
        kind is None and "role" not in item and "content" not in item
    )
    return name if is_reference and isinstance(name, str) else None


def numbered_items(
    items: Sequence[Item], owner: str, first: int = 0, taken: Collection[str] = ()
) -> list[Item]:
    """The items as they are stored: each with an id of its own, and content as a list of parts.

    Args:
        owner: id of the response or conversation that holds them.
        first: number of the first item.
        taken: ids that others have.
    """
    ids = set(taken)
    spare_numbers = count(first + len(items))
    numbered = []
    for number, item in enumerate(items, first):
        kind = item.get("type") or "message"
        name = item.get("id")
        if not isinstance(name, str) or not name or len(name) > 256 or name in ids:
            name = item_id(kind, owner, number)
            while name in ids:  # a client sent it with another item
                name = item_id(kind, owner, next(spare_numbers))
        ids.add(name)
        fields = item | {"id": name, "type": kind}
        if kind == "message":
            fields.setdefault("status", "completed")
            if isinstance(item.get("content"), str):
                text_type = "output_text" if item.get("role") == "assistant" else "input_text"
                part: Item = {"type": text_type, "text": item["content"]}
                if text_type == "output_text":
                    part["annotations"] = []
                fields["content"] = [part]
        numbered.append(fields)
    return numbered


def page_of_items(items: Mapping[str, Any], query: Mapping[str, str]) -> dict[str, Any]:
    """A page of a list of items, as the query's `limit`, `order` and `after` ask for it.

    Raises:
        ApiError: 400, one of them is malformed or names no item.
    """
    text = query.get("limit", str(DEFAULT_PAGE))
    limit = whole_number(text, max_digits=3)
    if limit is None or not 1 <= limit <= MAX_PAGE:
        raise ApiError(400, f"{text!r} is not a number from 1 to {MAX_PAGE}", param="limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"{order!r} is neither asc nor desc", param="order")
    ids = list(items)[:: 1 if order == "asc" else -1]
    start = 0
    if "after" in query:
        if query["after"] not in items:
            raise ApiError(400, f"there is no item {query['after']!r}", param="after")
        start = ids.index(query["after"]) + 1
    page = ids[start : start + limit]
    return {
        "object": "list",
        "data": [items[name] for name in page],
        "first_id": page[0] if page else "",
        "last_id": page[-1] if page else "",
        "has_more": start + limit < len(ids),
    }
