"""The formats of logs, a file for each family."""

from __future__ import annotations

from ramify.analysis.formats.bailian import BAILIAN
from ramify.analysis.formats.batches import BATCHES
from ramify.analysis.formats.claude_code import CLAUDE_CODE
from ramify.analysis.formats.codex import CODEX
from ramify.analysis.formats.dynamo import DYNAMO
from ramify.analysis.formats.gateway_csv import GATEWAY
from ramify.analysis.formats.har import HAR
from ramify.analysis.formats.helicone import HELICONE
from ramify.analysis.formats.langfuse import LANGFUSE
from ramify.analysis.formats.langsmith import LANGSMITH
from ramify.analysis.formats.lengths import LENGTHS
from ramify.analysis.formats.litellm import LITELLM
from ramify.analysis.formats.mooncake import MOONCAKE
from ramify.analysis.formats.otel import OTEL
from ramify.analysis.formats.plain import PLAIN
from ramify.analysis.formats.ramify_record import RAMIFY_RECORD
from ramify.analysis.formats.sglang import SGLANG
from ramify.analysis.formats.sharegpt import SHAREGPT
from ramify.analysis.formats.token_ids import TOKEN_IDS
from ramify.analysis.formats.vllm import VLLM
from ramify.analysis.formats.weka import WEKA
from ramify.analysis.formats.wrapped_bodies import BODIES
from ramify.analysis.reading import LogFormat

# The first whose `is_row` is true reads a row. Those that need more keys stand before those that need
# fewer; `PLAIN`, which takes any text, is last. Traces of a million rows come first.
FORMATS: tuple[LogFormat, ...] = (
    RAMIFY_RECORD,
    BAILIAN,
    MOONCAKE,
    BATCHES,
    LITELLM,
    LANGFUSE,
    HELICONE,
    LANGSMITH,
    OTEL,
    HAR,
    CLAUDE_CODE,
    CODEX,
    SGLANG,
    SHAREGPT,
    DYNAMO,
    WEKA,
    GATEWAY,
    BODIES,
    TOKEN_IDS,
    LENGTHS,
    VLLM,
    PLAIN,
)
