"""What providers' caches would read and write, and what it costs.

Three kinds of cache: `grid` (all whole steps up to the first difference), `breakpoints` (entries where
earlier prompts had a breakpoint), `whole_units` (stored units, whole or not at all). `rules` has the
figures of each model, from one dated file.
"""

from ramify.analysis.providers.conditions import AS_LOGGED, Conditions
from ramify.analysis.providers.detection import provider_of, provider_of_log
from ramify.analysis.providers.prompts import Billed, Prediction, ReplayPrompt, Timing
from ramify.analysis.providers.replay import CacheModel, in_start_order, prompts_of
from ramify.analysis.providers.rules import ModelRule, Rules, load_rules

__all__ = [
    "AS_LOGGED",
    "Billed",
    "CacheModel",
    "Conditions",
    "ModelRule",
    "Prediction",
    "ReplayPrompt",
    "Rules",
    "Timing",
    "in_start_order",
    "load_rules",
    "prompts_of",
    "provider_of",
    "provider_of_log",
]
