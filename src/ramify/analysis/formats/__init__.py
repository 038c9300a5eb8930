"""The formats of logs, in rooms by who writes them; `FORMATS` is the order in which they are tried.

`nested_json`, `row_fields`, `row_values`, `times` and `pending_rows` read values of rows.
"""

from __future__ import annotations

from ramify.analysis.formats.bodies.batches import BATCHES
from ramify.analysis.formats.bodies.wrapped_bodies import BODIES
from ramify.analysis.formats.engines.ramify_record import RAMIFY_RECORD
from ramify.analysis.formats.engines.sglang import SGLANG
from ramify.analysis.formats.engines.token_ids import TOKEN_IDS
from ramify.analysis.formats.engines.vllm import VLLM
from ramify.analysis.formats.gateways.gateway_csv import GATEWAY
from ramify.analysis.formats.gateways.har import HAR
from ramify.analysis.formats.gateways.helicone import HELICONE
from ramify.analysis.formats.gateways.langfuse import LANGFUSE
from ramify.analysis.formats.gateways.langsmith import LANGSMITH
from ramify.analysis.formats.gateways.litellm import LITELLM
from ramify.analysis.formats.otel.otlp_rows import OTEL
from ramify.analysis.formats.plain import PLAIN
from ramify.analysis.formats.traces.bailian import BAILIAN
from ramify.analysis.formats.traces.dynamo import DYNAMO
from ramify.analysis.formats.traces.lengths import LENGTHS
from ramify.analysis.formats.traces.mooncake import MOONCAKE
from ramify.analysis.formats.traces.weka import WEKA
from ramify.analysis.formats.transcripts.claude_code import CLAUDE_CODE
from ramify.analysis.formats.transcripts.codex import CODEX
from ramify.analysis.formats.transcripts.sharegpt import SHAREGPT
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
