"""The formats of logs, in rooms by who writes them; `FORMATS` is the order in which they are tried.

`columns` makes a reader of a gateway from the names of its columns. `nested_json`, `row_fields`,
`row_values`, `times` and `pending_rows` read values of rows.
"""

from __future__ import annotations

from ramify.analysis.reader import LogFormat
from ramify.analysis.readers.bodies.batches import BATCHES
from ramify.analysis.readers.bodies.wrapped_bodies import BODIES
from ramify.analysis.readers.engines.ramify_record import RAMIFY_RECORD
from ramify.analysis.readers.engines.sglang import SGLANG
from ramify.analysis.readers.engines.token_ids import TOKEN_IDS
from ramify.analysis.readers.engines.vllm import VLLM
from ramify.analysis.readers.gateways.gateway_csv import GATEWAY
from ramify.analysis.readers.gateways.har import HAR
from ramify.analysis.readers.gateways.helicone import HELICONE
from ramify.analysis.readers.gateways.langfuse import LANGFUSE
from ramify.analysis.readers.gateways.langsmith import LANGSMITH
from ramify.analysis.readers.gateways.litellm import LITELLM
from ramify.analysis.readers.otel.otlp_rows import OTEL
from ramify.analysis.readers.plain import PLAIN
from ramify.analysis.readers.traces.dynamo import DYNAMO
from ramify.analysis.readers.traces.hashed_traces import BAILIAN, MOONCAKE, WEKA
from ramify.analysis.readers.traces.lengths import LENGTHS
from ramify.analysis.readers.transcripts.claude_code import CLAUDE_CODE
from ramify.analysis.readers.transcripts.codex import CODEX
from ramify.analysis.readers.transcripts.sharegpt import SHAREGPT

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
