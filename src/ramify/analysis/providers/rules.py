"""Cache rules and prices of providers by model, from one dated file.

`data/provider_rules.json` is the built-in file. A file of the user's puts its models in front and
overrides defaults key by key; with `"replace": true` nothing of the built-in file remains. A model that
has no price in these files has that of a library, if it is installed (`library_prices`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from ramify.analysis.providers.library_prices import LibraryPrices
from ramify.errors import RulesError
from ramify.reasons import reason_of

SCHEMA = 1
HOUR_S = 3600.0  # a lifetime whose writes have a price of their own

Level = Literal["all", "system", "messages", "none"]
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Factor = Annotated[float, msgspec.Meta(ge=0)]


class ModelRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How prompts of some models are cached, and what their tokens cost."""

    cache: Literal["grid", "breakpoints", "units", "none"]
    models: tuple[str, ...] = ("*",)  # patterns with * and ?, of lower-case names
    min_tokens: Count = 0  # shorter prefixes are not cached
    step_tokens: Positive = 1  # a read ends at a multiple
    computes_last_token: bool = False  # a read leaves a token of the prompt to compute
    stores_output: bool = False  # the answer can be read as part of the next prompt
    lifetimes_s: tuple[Seconds, ...] = ()  # after the last use, the default first; (): no limit
    lifetime_low_s: Seconds | None = None  # where the vendor gives a range
    lifetime_high_s: Seconds | None = None
    max_breakpoints: Count = 0
    lookback: Positive | None = None  # positions that a breakpoint looks at, itself included
    max_looked_up: Positive | None = None  # breakpoints that are looked up, from the last
    implicit: bool = False  # the vendor sets a breakpoint at the last user message or tool result
    key_isolates: bool = False  # prompts with different cache keys share nothing
    max_requests_per_key_min: Positive | None = None  # more are spread over machines
    settings: dict[str, Level] = {}  # where the prefix that a change loses begins
    images_reset_messages: bool = False  # the first image loses the cached messages
    input_price: Factor | None = None  # US dollars for a million tokens
    read_multiplier: Factor = 1.0  # of the input price
    write_multiplier: Factor = 1.0
    write_1h_multiplier: Factor | None = None
    batch_multiplier: Factor = 1.0
    note: str = ""

    @property
    def lifetime_s(self) -> float | None:
        """Seconds after the last use in which an entry can be read; None: no limit."""
        return self.lifetimes_s[0] if self.lifetimes_s else None


class _ProviderTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    defaults: dict[str, Any] = {}
    families: dict[str, dict[str, Any]] = {}  # what models with `"family": NAME` have in common
    models: list[dict[str, Any]] = []


class _RulesFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: int
    date: str
    providers: dict[str, _ProviderTable]
    sources: list[str] = []
    replace: bool = False


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of all providers."""

    date: str
    sources: tuple[str, ...]
    providers: dict[str, tuple[ModelRule, ...]]  # the last one of each matches every model
    prices: LibraryPrices | None = None  # of models whose rule has none

    def rule_of(self, provider: str, model: str | None) -> ModelRule:
        """The first rule whose patterns match.

        Raises:
            RulesError: there are no rules of this provider.
        """
        rules = self.providers.get(provider)
        if rules is None:
            known = ", ".join(sorted(self.providers))
            raise RulesError(
                f"no cache rules for provider {provider!r}; the providers with rules are {known}: "
                "choose one with --provider, or add it in a file for --rules"
            )
        name = plain_model_name(model or "")
        for rule in rules[:-1]:
            if any(fnmatchcase(name, pattern) for pattern in rule.models):
                return rule
        return rules[-1]

    def priced_rule_of(self, provider: str, model: str | None) -> ModelRule:
        """`rule_of`, with the input price of the library where the rule has none.

        Factors of the price, as all else, are those of the rule.
        """
        rule = self.rule_of(provider, model)
        if rule.input_price is not None or self.prices is None:
            return rule
        price = self.prices.input_price(provider, plain_model_name(model or ""))
        return rule if price is None else msgspec.structs.replace(rule, input_price=price)

    def is_default(self, provider: str, model: str | None) -> bool:
        """Whether no pattern of the provider's matches this model."""
        return self.rule_of(provider, model) is self.providers[provider][-1]


def plain_model_name(model: str) -> str:
    """Lower-case name of a model without gateway, region and vendor: `us.anthropic.x` is `x`."""
    name = model.lower().rsplit("/", 1)[-1]
    return re.sub(r"^(?:[a-z-]+\.)?(?:anthropic|deepseek|openai)\.", "", name)


def load_rules(path: Path | None = None) -> Rules:
    """The built-in rules, extended or replaced by a file.

    Raises:
        RulesError: the file cannot be read, or a value in it cannot work.
    """
    built_in = _read(files("ramify").joinpath("data/provider_rules.json").read_bytes(), "built-in")
    if path is None:
        return _merge([("built-in rules", built_in)], LibraryPrices(built_in.date))
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RulesError(f"cannot read rules from {path}: {reason_of(error, path)}") from error
    own = _read(data, str(path))
    layers = [(str(path), own)]
    if own.replace:
        return _merge(layers)
    return _merge([("built-in rules", built_in), *layers], LibraryPrices(built_in.date))


def _read(data: bytes, name: str) -> _RulesFile:
    try:
        table = msgspec.json.decode(data, type=_RulesFile)
    except msgspec.DecodeError as error:
        raise RulesError(f"{name} is no rules file: {error}") from error
    if table.schema != SCHEMA:
        raise RulesError(f"{name} has schema {table.schema}; this version reads schema {SCHEMA}")
    return table


def _merge(layers: list[tuple[str, _RulesFile]], prices: LibraryPrices | None = None) -> Rules:
    """Rules of several files; later files go first."""
    providers = dict.fromkeys(name for _, layer in layers for name in layer.providers)
    merged = {}
    for provider in providers:
        defaults: dict[str, Any] = {}
        families: dict[str, dict[str, Any]] = {}
        rules: list[ModelRule] = []
        place = provider
        for name, layer in layers:
            if provider not in layer.providers:
                continue
            table = layer.providers[provider]
            defaults = {**defaults, **table.defaults}
            families = {**families, **table.families}
            place = f"{name}: {provider}"
            own = [
                _rule_of(model, defaults, families, f"{place}: models[{number}]")
                for number, model in enumerate(table.models)
            ]
            rules = own + rules
        merged[provider] = (*rules, _convert({**defaults, "models": ["*"]}, f"{place}: defaults"))
    return Rules(
        date=layers[-1][1].date,
        sources=tuple(source for _, layer in layers for source in layer.sources),
        providers=merged,
        prices=prices,
    )


def _rule_of(
    model: dict[str, Any],
    defaults: dict[str, Any],
    families: dict[str, dict[str, Any]],
    place: str,
) -> ModelRule:
    """A model's own fields over those of its family, over the defaults."""
    own = {name: value for name, value in model.items() if name != "family"}
    family = families.get(str(model["family"])) if "family" in model else {}
    if family is None:
        known = ", ".join(sorted(families)) or "none"
        raise RulesError(f"{place}: no family {model['family']!r}; the families are {known}")
    return _convert({**defaults, **family, **own}, place)


def _convert(values: dict[str, Any], place: str) -> ModelRule:
    try:
        return msgspec.convert(values, ModelRule)
    except msgspec.ValidationError as error:
        raise RulesError(f"{place}: {error}") from error
