"""Chats that are drawn: questions about a document, and users who talk for several turns."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

CountTokens = Callable[[str], int]
Message = dict[str, str]  # role, content

MAKERS = "Mara Quist,Ivo Lindqvist,Sana Okafor,Tilda Brandt,Emil Castellane,Noor Haddad".split(",")
THINGS = "clock,violin,lantern,globe,sextant,telescope,kettle,loom,barometer,camera".split(",")
MATERIALS = "copper,oak,brass,walnut,silver,slate,ivory,tin,glass,iron".split(",")
ROOMS = "north wing,attic,long gallery,map room,cellar,tower,winter garden,library".split(",")
EXHIBIT = (
    "Exhibit {number} is a {material} {thing} in the {room}. {maker} made it in {year} and repaired it "
    "{repairs} times; the museum paid {price} crowns for it."
)
TOPICS = (
    "how a museum should light an old {thing}",
    "why a {thing} of {material} lasts longer in the {room}",
    "what a visitor asks first about a {thing}",
    "which tools {maker} needed to make a {thing}",
)


@dataclass(frozen=True, slots=True)
class Chats:
    """What users write behind a common system prompt; all users begin at once."""

    system: str
    users: tuple[tuple[str, ...], ...]  # user → their messages, each sent after the last answer
    num_new: int  # tokens of every answer

    @property
    def num_requests(self) -> int:
        """Messages of all users."""
        return sum(map(len, self.users))

    def openings(self) -> list[list[Message]]:
        """Each user's first request."""
        system = {"role": "system", "content": self.system}
        return [[system, {"role": "user", "content": messages[0]}] for messages in self.users]


def document(rng: random.Random, num_tokens: int, count_tokens: CountTokens) -> str:
    """An inventory of about `num_tokens` tokens, at most an exhibit more. Its first line is its own."""
    lines = [f"Inventory {rng.randrange(10**9)} of the museum."]
    size = count_tokens(lines[0])
    while size < num_tokens:
        lines.append(
            EXHIBIT.format(
                number=len(lines),
                material=rng.choice(MATERIALS),
                thing=rng.choice(THINGS),
                room=rng.choice(ROOMS),
                maker=rng.choice(MAKERS),
                year=rng.randrange(1700, 1950),
                repairs=rng.randrange(2, 9),
                price=rng.randrange(100, 9_999),
            )
        )
        size += count_tokens("\n" + lines[-1])
    return "\n".join(lines)


def questions(
    seed: int,
    count_tokens: CountTokens,
    *,
    num_tokens: int,
    count: int,
    num_new: int,
    first: int = 1,
) -> Chats:
    """`count` users with a question each about the document of this seed.

    Args:
        first: number of the exhibit that the first question is about; others give other questions.
    """
    system = "Answer from this document.\n\n" + document(
        random.Random(seed), num_tokens, count_tokens
    )
    numbers = range(first, first + count)
    users = tuple((f"What is exhibit {number}, and who made it?",) for number in numbers)
    return Chats(system, users, num_new)


def conversations(
    seed: int,
    count_tokens: CountTokens,
    *,
    system_tokens: int,
    users: int,
    num_messages: int,
    num_new: int,
) -> Chats:
    """`users` who write `num_messages` each behind one system prompt."""
    rng = random.Random(seed)
    system = "You guide visitors.\n\n" + document(rng, system_tokens, count_tokens)
    return Chats(
        system,
        tuple(tuple(_message(rng) for _ in range(num_messages)) for _ in range(users)),
        num_new,
    )


def _message(rng: random.Random) -> str:
    wishes: Sequence[str] = [
        topic.format(
            thing=rng.choice(THINGS),
            material=rng.choice(MATERIALS),
            room=rng.choice(ROOMS),
            maker=rng.choice(MAKERS),
        )
        for topic in rng.sample(TOPICS, 3)
    ]
    return f"Tell me {', '.join(wishes[:-1])}, and {wishes[-1]}."
