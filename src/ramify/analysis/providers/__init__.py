"""What providers' caches would read and write, and what it costs.

Of vendors: `rules` has the figures of each model, from one dated file (`library_prices`: where that
has no price), `detection` says whose rule a request falls under, `positions` what a breakpoint looks
back over, `money` what tokens cost. Of replays: `prompts` has what a rule sees and answers, `caches`
the entries, `conditions` which limits are lifted; `replay` runs prompts through caches. `conversations` names those of one request, `agreement` compares
the outcome with what was billed.
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
