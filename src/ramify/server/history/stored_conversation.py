"""`StoredConversation`: the items of a conversation of `/v1/conversations`, as they are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ramify.server.history.expiring_store import ExpiringStore
from ramify.server.prompts.renderer import KnownPrefix

MAX_ITEMS = 10_000  # of one conversation
ITEM_BYTES = 256  # objects of an item, whatever it holds


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """Items by their ids, in order, as JSON."""

    id: str
    created_at: int  # Unix seconds
    metadata: Mapping[str, str]
    items: Mapping[str, bytes] = field(default_factory=dict)
    num_added: int = 0  # items ever added: the number of the next
    known: tuple[KnownPrefix, ...] = ()  # of its last response

    @property
    def num_bytes(self) -> int:
        """Bytes of memory."""
        texts = sum(map(len, self.items)) + sum(map(len, self.items.values()))
        known = sum(prefix.num_bytes for prefix in self.known)
        metadata = sum(len(name) + len(value) for name, value in self.metadata.items())
        return (len(self.items) + 4) * ITEM_BYTES + texts + known + metadata * 4

    def with_items(
        self, items: Sequence[tuple[str, bytes]], known: Sequence[KnownPrefix] = ()
    ) -> StoredConversation:
        """The conversation with further items; one whose id it has already is replaced."""
        return replace(
            self,
            items={**self.items, **dict(items)},
            num_added=self.num_added + len(items),
            known=tuple(known),
        )

    def without_item(self, item_id: str) -> StoredConversation:
        """The conversation without an item."""
        items = {name: item for name, item in self.items.items() if name != item_id}
        return replace(self, items=items, known=())


def has_room(
    store: ExpiringStore[StoredConversation],
    conversation: StoredConversation,
    num_items: int,
    num_bytes: int,
) -> bool:
    """Whether a conversation can be kept with further items; its `known` can be left out."""
    num_bytes += replace(conversation, known=()).num_bytes + num_items * ITEM_BYTES
    return len(conversation.items) + num_items <= MAX_ITEMS and num_bytes <= store.max_tenant_bytes


def put_conversation(
    store: ExpiringStore[StoredConversation], tenant: str, conversation: StoredConversation
) -> bool:
    """Add or replace a conversation; returns False if it is too large to be kept.

    One that is too large changes nothing: an earlier version stays.
    """
    if not has_room(store, conversation, 0, 0):
        return False
    if conversation.num_bytes > store.max_tenant_bytes:
        conversation = replace(conversation, known=())
    store.put(tenant, conversation.id, conversation)
    return True
