"""Documents full of small facts, and questions about them: what `ramify-tiny` is trained on.

A document is the chronicle of a village: who has how many of what, where things are, codes, dates,
and sentences in between that mean nothing. A seed names a document. Standard library only.

    python scripts/tiny_documents.py --seed demo-1 --num-facts 12
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass

NAMES = (
    "Mara Ivan Lena Omar Nora Felix Ruth Hugo Anna Boris Clara David Elsa Frank Greta Henry Iris Jonas "
    "Kira Leo Mia Nils Olga Paul Rosa Simon Tara Ugo Vera Walter Yara Zoe Adam Bella Carl Dora Emil "
    "Flora Georg Hanna Igor Julia Karl Laura Max Nina Otto Petra Quinn Rita Sven Tilda"
).split()
GOODS = (
    "lamps ropes books coins boats bells hats cups spoons chairs clocks keys stamps shells jars "
    "baskets candles tents maps plates kites pens rings drums boxes sheep geese hens goats ponies"
).split()
THINGS = (
    "violin ladder kettle lantern mirror hammer saddle trumpet compass anchor basket telescope piano "
    "carpet bicycle globe sword crown whistle umbrella suitcase typewriter camera harp wagon sledge "
    "canoe statue loom barrel"
).split()
PLACES = (
    "in the attic|in the cellar|in the kitchen|in the library|in the garden|in the stable|in the tower|"
    "in the chapel|in the school|in the mill|in the forest|in the cave|on the roof|on the balcony|"
    "on the stairs|on the shelf|on the bench|on the island|under the bridge|under the bed|"
    "under the table|under the oak|behind the barn|behind the curtain|behind the bakery|"
    "near the well|near the harbour|near the fountain|near the station|near the wall"
).split("|")
COLOURS = (
    "red blue green yellow white black orange purple pink brown grey silver golden crimson amber ivory "
    "scarlet copper olive ruby"
).split()
TOPICS = (
    "bridges taxes roads music bread water trees fish wine schools bees horses salt stars weather "
    "theatre poems chess apples cheese wool ghosts rivers glass snow paint soup honey fire mills"
).split()
CITIES = (
    "Oslo Lima Rome Paris Cairo Delhi Kyoto Quito Berlin Madrid Dublin Vienna Prague Athens Lisbon "
    "Warsaw Geneva Boston Havana Nairobi Tokyo Seoul Milan Porto Basel Ghent Turin Bergen Malta Hanoi"
).split()
JOBS = (
    "baker doctor farmer painter sailor teacher tailor lawyer singer miner judge poet pilot barber "
    "butcher gardener carpenter dancer nurse printer potter weaver hunter driver cook"
).split()
MONTHS = (
    "January February March April May June July August September October November December".split()
)
TITLES = (
    "Notes from the village, kept for whoever comes next.",
    "This is the chronicle of a small town by the sea.",
    "A few things worth knowing about the valley.",
    "Here is what the postman wrote down this year.",
    "From the diary of the night watch.",
)
FILLERS = (
    "The morning was cold and clear.",
    "It rained for most of the week.",
    "Nobody was in a hurry.",
    "The dogs slept in the sun.",
    "There was little news from the coast.",
    "In the evening the wind grew strong.",
    "Someone was singing down by the river.",
    "The old people said it had always been so.",
    "After lunch the streets were empty.",
    "A letter came, but nobody opened it.",
    "The children made a fire and told stories.",
    "It was a good year for plums.",
    "The moon was full that night.",
    "Some things are easy to forget.",
    "The market was busy again.",
    "At last the road was dry.",
    "Smoke rose over the houses.",
    "The cat, as always, had other plans.",
    "Winter came early to the hills.",
    "That is how things are done here.",
    "Not everyone was happy about it.",
    "The bell rang twice and then fell silent.",
    "Far away a storm was passing.",
    "They had tea and talked until late.",
)


@dataclass(frozen=True, slots=True)
class Fact:
    """One sentence of a document, a question about it, and the exact answer."""

    kind: str
    sentence: str
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Document:
    """A text and its facts in the order in which the text states them."""

    text: str
    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """How one sort of fact is said and asked: `{key}`, `{value}` and `{noun}` are filled in."""

    keys: tuple[str, ...]
    value: Callable[[random.Random], str]
    nouns: tuple[str, ...]  # a second noun, unique within a document; () when there is none
    sentences: tuple[str, ...]  # the key always comes before the value
    questions: tuple[str, ...]
    answer: str


def _one_of(*words: str) -> Callable[[random.Random], str]:
    return lambda rng: rng.choice(words)


def _date(rng: random.Random) -> str:
    return f"{rng.randint(1, 28)} {rng.choice(MONTHS)}"


def _time(rng: random.Random) -> str:
    return f"{rng.randint(5, 22)}:{rng.randint(0, 59):02d}"


KINDS = {
    "count": Kind(
        keys=tuple(NAMES),
        value=lambda rng: str(rng.randint(2, 99)),
        nouns=tuple(GOODS),
        sentences=(
            "{key} has {value} {noun}.",
            "{key} owns {value} {noun}.",
            "In all, {key} has {value} {noun}.",
        ),
        questions=("How many {noun} does {key} have?", "How many {noun} does {key} own?"),
        answer="{value}",
    ),
    "place": Kind(
        keys=tuple(THINGS),
        value=_one_of(*PLACES),
        nouns=(),
        sentences=(
            "The {key} is {value}.",
            "You will find the {key} {value}.",
            "Someone left the {key} {value}.",
        ),
        questions=("Where is the {key}?", "Where can I find the {key}?"),
        answer="{value}",
    ),
    "code": Kind(
        keys=tuple(COLOURS),
        value=lambda rng: f"{rng.randint(1000, 9999)}",
        nouns=(),
        sentences=(
            "The code of the {key} door is {value}.",
            "The {key} door opens with {value}.",
            "To open the {key} door, enter {value}.",
        ),
        questions=("What is the code of the {key} door?", "Which code opens the {key} door?"),
        answer="{value}",
    ),
    "date": Kind(
        keys=tuple(TOPICS),
        value=_date,
        nouns=(),
        sentences=(
            "The meeting about {key} is on {value}.",
            "They will meet about {key} on {value}.",
            "The next meeting about {key} will be on {value}.",
        ),
        questions=("When is the meeting about {key}?", "When will they meet about {key}?"),
        answer="on {value}",
    ),
    "home": Kind(
        keys=tuple(NAMES),
        value=_one_of(*CITIES),
        nouns=(),
        sentences=(
            "{key} lives in {value}.",
            "{key} has a house in {value}.",
            "These days {key} lives in {value}.",
        ),
        questions=("Where does {key} live?", "In which city does {key} live?"),
        answer="in {value}",
    ),
    "job": Kind(
        keys=tuple(NAMES),
        value=_one_of(*JOBS),
        nouns=(),
        sentences=(
            "{key} works as a {value}.",
            "{key} is a {value}.",
            "For years {key} has been a {value}.",
        ),
        questions=("What is the job of {key}?", "What does {key} do for a living?"),
        answer="a {value}",
    ),
    "owner": Kind(
        keys=tuple(THINGS),
        value=_one_of(*NAMES),
        nouns=(),
        sentences=(
            "The {key} belongs to {value}.",
            "They gave the {key} to {value}.",
            "Everyone knows that the {key} belongs to {value}.",
        ),
        questions=("To whom does the {key} belong?", "To whom did they give the {key}?"),
        answer="to {value}",
    ),
    "train": Kind(
        keys=tuple(CITIES),
        value=_time,
        nouns=(),
        sentences=(
            "The train to {key} leaves at {value}.",
            "Every day the train to {key} leaves at {value}.",
            "There is a train to {key} at {value}.",
        ),
        questions=("When does the train to {key} leave?", "At what time is the train to {key}?"),
        answer="at {value}",
    ),
}
FACTS_PER_KIND = 20  # the fewest keys that a kind has


def _facts(rng: random.Random, num_facts: int, num_kinds: int) -> list[Fact]:
    kinds = rng.sample(tuple(KINDS), num_kinds)
    keys = {name: rng.sample(kind.keys, len(kind.keys)) for name, kind in KINDS.items()}
    nouns = {name: rng.sample(kind.nouns, len(kind.nouns)) for name, kind in KINDS.items()}
    facts: list[Fact] = []
    while len(facts) < num_facts:
        name = rng.choice(kinds)
        kind = KINDS[name]
        if not keys[name] or (kind.nouns and not nouns[name]):
            continue
        noun = nouns[name].pop() if kind.nouns else ""
        fields = {"key": keys[name].pop(), "value": kind.value(rng), "noun": noun}
        facts.append(
            Fact(
                kind=name,
                sentence=rng.choice(kind.sentences).format(**fields),
                question=rng.choice(kind.questions).format(**fields),
                answer=kind.answer.format(**fields),
            )
        )
    return facts


def make_document(
    rng: random.Random,
    *,
    num_facts: int,
    num_kinds: int = len(KINDS),
    filler_share: float = 0.2,
) -> Document:
    """A document of `num_facts` facts, about 12 tokens each, whose questions have one answer each.

    Args:
        num_facts: 1 to `FACTS_PER_KIND` for each kind.
        num_kinds: how many kinds of facts may occur. With few, facts differ by their keys alone.
        filler_share: how often a sentence without a fact stands before a fact; one begins every
            paragraph, so that no key stands at the start of a line.
    """
    assert 0 < num_facts <= FACTS_PER_KIND * num_kinds
    facts = _facts(rng, num_facts, num_kinds)
    paragraphs = [[rng.choice(TITLES)]]
    left = rng.randint(3, 8)  # sentences until the next paragraph
    for fact in facts:
        if left <= 0:
            paragraphs.append([rng.choice(FILLERS)])
            left = rng.randint(4, 9)
        elif rng.random() < filler_share:
            paragraphs[-1].append(rng.choice(FILLERS))
        paragraphs[-1].append(fact.sentence)
        left -= 1
    return Document("\n\n".join(" ".join(paragraph) for paragraph in paragraphs), tuple(facts))


def main() -> None:
    """Print the document of a seed, and its questions."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", default="demo-1")
    parser.add_argument("--num-facts", type=int, default=12)
    args = parser.parse_args()
    document = make_document(random.Random(args.seed), num_facts=args.num_facts)
    print(document.text, end="\n\n")
    for fact in document.facts:
        print(f"{fact.question} -> {fact.answer}")


if __name__ == "__main__":
    main()
