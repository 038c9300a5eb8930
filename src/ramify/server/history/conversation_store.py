"""Conversations of `/v1/conversations`, by tenant: bounded in bytes, number and age."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ramify.engine.text.tenant_lru import TenantLru
from ramify.server.prompts.renderer import KnownPrefix

MAX_CONVERSATIONS = 4096
MAX_BYTES = 256 << 20
MAX_TENANT_BYTES = 64 << 20
MAX_ITEMS = 10_000  # of one conversation
TTL_S = 24 * 3600.0  # since the last change
ITEM_BYTES = 256  # objects of an item, whatever it holds


@dataclass(frozen=True, slots=True)
class Conversation:
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
    ) -> Conversation:
        """The conversation with further items; one whose id it has already is replaced."""
        return replace(
            self,
            items={**self.items, **dict(items)},
            num_added=self.num_added + len(items),
            known=tuple(known),
        )

    def without_item(self, item_id: str) -> Conversation:
        """The conversation without an item."""
        items = {name: item for name, item in self.items.items() if name != item_id}
        return replace(self, items=items, known=())


class ConversationStore:
    """Conversations by tenant and id.

    Over a limit in all, the oldest conversation of the tenant with most is forgotten.

    Args:
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        *,
        max_conversations: int = MAX_CONVERSATIONS,
        max_bytes: int = MAX_BYTES,
        max_tenant_bytes: int = MAX_TENANT_BYTES,
        ttl_s: float = TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ttl_s, self._clock = ttl_s, clock
        self._conversations: TenantLru[str, tuple[float, Conversation]] = TenantLru(
            max_cost=max_bytes, max_tenant_cost=max_tenant_bytes, max_entries=max_conversations
        )

    def __len__(self) -> int:
        return len(self._conversations)

    @property
    def num_bytes(self) -> int:
        """Bytes of all conversations."""
        return self._conversations.cost

    @property
    def max_tenant_bytes(self) -> int:
        """The most bytes that a tenant's conversations may have."""
        return self._conversations.max_tenant_cost

    def get(self, tenant: str, name: str) -> Conversation | None:
        """A tenant's conversation; None if it is unknown or expired."""
        entry = self._conversations.get(tenant, name)
        if entry is None or entry[0] <= self._clock():
            return None
        return entry[1]

    def has_room(self, conversation: Conversation, num_items: int, num_bytes: int) -> bool:
        """Whether a conversation can be kept with further items; its `known` can be left out."""
        num_bytes += replace(conversation, known=()).num_bytes + num_items * ITEM_BYTES
        return (
            len(conversation.items) + num_items <= MAX_ITEMS and num_bytes <= self.max_tenant_bytes
        )

    def put(self, tenant: str, conversation: Conversation) -> bool:
        """Add or replace a conversation; returns False if it is too large to be kept.

        One that is too large changes nothing: an earlier version stays.
        """
        if not self.has_room(conversation, 0, 0):
            return False
        num_bytes = conversation.num_bytes
        if num_bytes > self.max_tenant_bytes:
            conversation = replace(conversation, known=())
            num_bytes = conversation.num_bytes
        self._expire()
        entry = (self._clock() + self.ttl_s, conversation)
        self._conversations.put(tenant, conversation.id, entry, num_bytes)
        return True

    def forget(self, tenant: str, name: str) -> bool:
        """Forget a conversation; returns whether it was there."""
        return self._conversations.pop(tenant, name) is not None

    def _expire(self) -> None:
        now = self._clock()
        for tenant in self._conversations.tenants:
            while (oldest := self._conversations.oldest(tenant)) and oldest[1][0] <= now:
                self._conversations.pop(tenant, oldest[0])
