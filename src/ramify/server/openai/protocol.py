"""Request types of OpenAI's endpoints; see `unsupported` for the fields that they do not have."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct, UnsetType

Temperature = Annotated[float, Meta(ge=0, le=2)]
UnitInterval = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
MAX_INT = 2**63 - 1  # a larger number fits into no message to a replica, and into no span
PositiveInt = Annotated[int, Meta(ge=1, le=MAX_INT)]
NonNegativeInt = Annotated[int, Meta(ge=0, le=MAX_INT)]
OutputLimit = Annotated[
    int, Meta(ge=-1, le=MAX_INT)
]  # -1: none; 0 is refused where it has no meaning
TopK = Annotated[int, Meta(ge=-1, le=MAX_INT)]  # 0 and -1: off
Seed = Annotated[int, Meta(ge=-(2**63), le=MAX_INT)]
# Lists of token ids, and `logit_bias`, may be as long as a vocabulary: a body's limits bound them.
StopText = Annotated[str, Meta(min_length=1, max_length=4096)]
Stops = Annotated[list[StopText], Meta(max_length=4096)]
Name = Annotated[str, Meta(max_length=256)]
# MCP clients write `server:tool` and `server/tool`.
ToolName = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9_.:/-]{1,256}$",
        description="A tool's name has 1 to 256 characters: ASCII letters, digits, and _ . : / -",
    ),
]
CacheSalt = Annotated[str, Meta(max_length=1024)]
Priority = Annotated[int, Meta(ge=-1000, le=1000)]
NumLogprobs = Annotated[int, Meta(ge=0, le=20)]
BreakpointTtl = Literal["30m", "1h", "12h", "24h"]
CacheRetention = Literal["in_memory", "24h"]
Bias = dict[str, Annotated[float, Meta(ge=-100, le=100)]]
Metadata = Annotated[  # kept with the response, so its size is bounded
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]
MAX_MESSAGES = 10_000
RefusedField = Raw | UnsetType  # not decoded, see `is_given`


def is_given(value: RefusedField | bool | None) -> bool:
    """Whether a field that is refused has a value: not null, false or empty."""
    if not isinstance(value, Raw):
        return value is True
    return bytes(value).strip() not in (b"", b"null", b"false", b"[]", b"{}", b'""', b"0")


class PromptCacheBreakpoint(Struct):
    """Pin the prompt up to the end of this block."""

    mode: Literal["explicit"] = "explicit"
    ttl: BreakpointTtl | None = None


class PromptCacheOptions(Struct):
    """Options of a request for the prompt cache."""

    mode: Literal["implicit", "explicit"] | None = None  # None: implicit
    ttl: BreakpointTtl | None = None  # of all breakpoints
    prewarm: bool | None = None
    comparison_response_id: Name | None = None


class ContentPart(Struct):
    """A block of a message's content; images, audio and files become placeholders."""

    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: str | list[ContentPart] | None = None  # Mistral's form of an assistant's reasoning
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class FunctionCall(Struct):
    """The function and the arguments of a tool call."""

    name: Name
    arguments: Any = None  # the text of a JSON object; some clients send the object itself


class ToolCall(Struct):
    """A tool call in an assistant's message."""

    function: FunctionCall
    id: Name = ""
    type: Literal["function"] = "function"


class ChatMessage(Struct):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: Name | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: FunctionCall | None = None  # older form of a single tool call
    tool_call_id: Name | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of `reasoning_content`
    refusal: str | None = None


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]


class FunctionDefinition(Struct):
    """Name and schema of a function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct):
    """A tool that the model may call; only functions are served."""

    function: FunctionDefinition
    type: Literal["function"] = "function"


class NamedFunction(Struct):
    """The name of the function that the model must call."""

    name: Name


class NamedTool(Struct):
    """`tool_choice` of one tool, which the model must call."""

    function: NamedFunction
    type: Literal["function"] = "function"


class JsonSchema(Struct):
    """The JSON schema that an answer must match."""

    name: Name | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct):
    """Whether an answer is text, a JSON object, or JSON of a schema.

    Clients write the schema, its name and `strict` beside the type, or inside of `json_schema`.
    """

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: dict[str, Any] | None = None
    schema: dict[str, Any] | None = None
    name: Name | None = None
    description: str | None = None
    strict: bool | None = None


Schema = dict[str, Any] | str  # a JSON schema, or its text
Regex = Annotated[str, Meta(max_length=16384)]
Grammar = Annotated[str, Meta(max_length=65536)]
Choices = Annotated[list[str], Meta(max_length=1024)]


class StructuredOutputs(Struct):
    """The format of an answer, in vLLM's words."""

    json: Schema | None = None
    regex: Regex | None = None
    choice: Choices | None = None
    grammar: Grammar | None = None
    json_object: bool | None = None
    structural_tag: Any = None  # refused


class StreamOptions(Struct):
    """Whether a stream ends with `usage`, or has it in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampling(Struct, kw_only=True):
    """Options of both completion endpoints: OpenAI's, and those that vLLM and SGLang add."""

    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_p: UnitInterval | None = None
    top_k: TopK | None = None
    min_p: UnitInterval | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    seed: Seed | None = None
    stop: StopText | Stops | None = None
    stop_token_ids: list[NonNegativeInt] | None = None
    max_tokens: OutputLimit | None = None
    min_tokens: NonNegativeInt | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: Bias | None = None
    regex: Regex | None = None
    grammar: Grammar | None = None
    choice: Choices | None = None
    # The same in the words of vLLM (the next five), SGLang and llama.cpp.
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Regex | None = None
    guided_choice: Choices | None = None
    guided_grammar: Grammar | None = None
    json_schema: Schema | None = None
    ebnf: Grammar | None = None
    response_format: ResponseFormat | None = None
    # For routing between servers; it does not separate cached prefixes, as `cache_salt` does.
    prompt_cache_key: Name | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: CacheRetention | None = None
    cache_salt: CacheSalt | None = None
    session_id: Name | None = None
    end_session: bool | None = None  # with this request
    priority: Priority | None = None
    user: str | None = None
    # vLLM's
    allowed_token_ids: list[NonNegativeInt] | None = None
    bad_words: Annotated[list[StopText], Meta(max_length=16_384)] | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: NumLogprobs | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None  # -1: to what fits

    @property
    def is_prewarm(self) -> bool:
        """True if the prompt is only to be computed and cached."""
        options = self.prompt_cache_options
        return options is not None and bool(options.prewarm)


class ReasoningOption(Struct):
    """`reasoning` of a chat request: how much the model should think."""

    effort: Name | None = None
    enabled: bool | None = None
    max_tokens: NonNegativeInt | None = None
    exclude: bool | None = None  # leave the reasoning out of the response


class ThinkingOption(Struct):
    """`thinking` of a chat request: whether the model should think."""

    type: Name
    budget_tokens: NonNegativeInt | None = None


class ChatRequest(Sampling, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Messages
    prefix: Name | None = None  # that the messages follow
    max_completion_tokens: OutputLimit | None = None
    logprobs: bool | Literal[0, 1] | None = None
    top_logprobs: NumLogprobs | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    # How much the model should think: see `chat_request.reasoning_options`.
    reasoning_effort: Name | None = None
    reasoning: ReasoningOption | None = None
    enable_thinking: bool | None = None
    thinking: bool | ThinkingOption | None = None
    thinking_budget: NonNegativeInt | None = None
    include_reasoning: bool | None = None
    verbosity: Name | None = None
    service_tier: Name | None = None
    store: bool | None = None  # False: no later request can compare with this one
    modalities: list[str] | None = None
    add_generation_prompt: bool | None = None  # None: unless the final message is continued
    continue_final_message: bool | None = None
    echo: bool | None = None  # the answer begins with the text that it continues
    # For chat templates that take them: texts, or objects with the fields that the template reads.
    documents: Annotated[list[str | dict[str, Any]], Meta(max_length=1024)] | None = None
    chat_template_kwargs: (
        Annotated[dict[str, bool | int | str | None], Meta(max_length=16)] | None
    ) = None


class CompletionRequest(Sampling, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    # max_tokens 0 with `echo`: the prompt and its logprobs only
    echo: bool | None = None
    logprobs: NumLogprobs | Literal[False] | None = None
    suffix: str | None = None
    best_of: PositiveInt | None = None
    add_special_tokens: bool | None = None


class TokenizeRequest(ChatRequest, kw_only=True):
    """POST /tokenize: `prompt`, or the fields of a chat request, whose prompt is tokenised."""

    messages: Messages | None = None  # type: ignore[assignment]
    prompt: str | None = None
    add_special_tokens: bool | None = None  # of a `prompt`; templates write their own
    return_token_strs: bool | None = None


class EmbeddingsRequest(Struct, kw_only=True):
    """POST /v1/embeddings."""

    input: str | list[Any]  # a text, token ids, or a list of either
    model: Name | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: PositiveInt | None = None
    prompt_name: str | None = None  # of the checkpoint's prompts, put before each text
    user: str | None = None


class ScoreRequest(Struct, kw_only=True):
    """POST /v1/score."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: Name | None = None


class RerankRequest(Struct, kw_only=True):
    """POST /v1/rerank."""

    query: str
    documents: list[str | dict[str, Any]]
    model: Name | None = None
    top_n: PositiveInt | None = None
    return_documents: bool = False


class DetokenizeRequest(Struct):
    """POST /detokenize."""

    tokens: Annotated[list[int], Meta(max_length=10_000_000)]
    model: Name | None = None
