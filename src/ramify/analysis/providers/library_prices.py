"""Prices of models that no rule has a price for, from `genai-prices` where it is installed.

The library brings its prices with it, so that one version of it gives one figure: nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any

# Providers that sell tokens, by the library's names. Bedrock's prices depend on the region.
_SELLERS = {
    "anthropic": "anthropic",
    "deepseek": "deepseek",
    "gemini": "google",
    "openai": "openai",
}
_NUM_TOKENS = 1000  # priced at once: no tier for long prompts begins so early


def _load_library() -> Any | None:
    return import_module("genai_prices") if find_spec("genai_prices") is not None else None


class LibraryPrices:
    """The prices of the installed version of the library on one day; none if it is not installed."""

    def __init__(self, date: str, load: Callable[[], Any | None] = _load_library) -> None:
        """Loads nothing yet: the library is imported for the first model without a price.

        Args:
            date: as `2026-11-25`; vendors have prices by date and time of day, these are those of noon
                UTC.
            load: imports the library, or returns None.
        """
        self._date, self._load = date, load

    @cached_property
    def _library(self) -> Any | None:
        return self._load()

    @property
    def source(self) -> str:
        """Name and version of the library, and the day of the prices."""
        version = "" if self._library is None else f" {self._library.__version__}"
        return f"genai-prices{version}, prices of {self._date}"

    def input_price(self, provider: str, model: str) -> float | None:
        """US dollars for a million input tokens of a model; None if the library does not know it.

        Args:
            provider: whose rule the model falls under.
            model: its name without gateway, region and vendor.
        """
        seller = _SELLERS.get(provider)
        if seller is None or not model or self._library is None:
            return None
        try:
            cost = self._library.calc_price(
                self._library.Usage(input_tokens=_NUM_TOKENS),
                model,
                provider_id=seller,
                genai_request_timestamp=datetime.fromisoformat(self._date).replace(
                    hour=12, tzinfo=UTC
                ),
            )
        except LookupError:
            return None
        return float(cost.input_price) * 1e6 / _NUM_TOKENS
