"""The analyser: what requests in a log share, why hits are lost, and what a change would save.

`files` opens logs and `readers` turn their rows into `records` (`reader`: what a reader implements;
`log_files`: files to requests); `corpus` stores each text once, `tokens` counts.
`verdicts` and `findings` are the results (`lint_json`: as JSON), `explaining` compares two requests.
`linting` is the way from there to a report: `predecessor` finds the earlier request that shares most
(`unit_tree`: a tree of prompts), `compare` says why the later one could not read what the earlier one
wrote, `providers` have the cache rules of vendors and engines (`prefix_index`: the longest
shared prefix), `savings` mends the log and replays it; `progress` says how far it is.
`sharing` has the tree of prefixes, `simulation` a cache of finite capacity, `report` draws all of it.
No torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramify.analysis.linting import lint
    from ramify.analysis.log_files import read_log
    from ramify.analysis.sharing.prefix_matcher import RequestPrefixMatcher
    from ramify.analysis.sharing.request_tree import RequestTree
    from ramify.analysis.simulation.calls import simulate

__all__ = ["RequestPrefixMatcher", "RequestTree", "lint", "read_log", "simulate"]

_MODULES = {
    "RequestPrefixMatcher": "ramify.analysis.sharing.prefix_matcher",
    "RequestTree": "ramify.analysis.sharing.request_tree",
    "lint": "ramify.analysis.linting",
    "read_log": "ramify.analysis.log_files",
    "simulate": "ramify.analysis.simulation.calls",
}


def __getattr__(name: str) -> Any:
    """Import a call when it is used: the package itself loads nothing."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
