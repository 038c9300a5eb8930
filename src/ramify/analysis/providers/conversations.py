"""Which requests are a conversation of one request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from ramify.analysis.providers.prompts import ReplayPrompt
from ramify.analysis.providers.replay import CacheModel


def single_requests(model: CacheModel, prompts: Iterable[ReplayPrompt]) -> frozenset[int]:
    """Numbers of requests whose conversation has no other request.

    Without a conversation's id, a request belongs to a longer conversation if its prompt begins with
    another request's whole prompt, or another's with its own.
    """
    named: defaultdict[str, list[int]] = defaultdict(list)
    whole: dict[int, list[int]] = {}  # hash of a whole prompt: requests
    chains: list[tuple[int, list[int]]] = []
    for prompt in prompts:
        info, number = prompt.request.info, prompt.request.number
        if info.conversation is not None:
            named[info.conversation].append(number)
            continue
        if info.hashed is not None:
            continue
        layout = model.layout(prompt)
        chain = layout.chain[layout.level_starts["messages"] + 1 :].tolist()
        if chain:
            whole.setdefault(chain[-1], []).append(number)
            chains.append((number, chain))
    joined: set[int] = set()
    for number, chain in chains:
        for key in chain[:-1]:
            if key in whole:
                joined.add(number)
                joined.update(whole[key])
        if len(whole[chain[-1]]) > 1:
            joined.add(number)
    by_name = {numbers[0] for numbers in named.values() if len(numbers) == 1}
    return frozenset(by_name | ({number for number, _ in chains} - joined))
