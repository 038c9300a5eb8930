"""OpenAI's Responses API over chat: text and functions; a response can be gone on from by its id."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from ramify.server.errors import ApiError
from ramify.server.openai_answers import ChatAnswer
from ramify.server.openai_requests import chat_job
from ramify.server.openai_types import (
    MAX_MESSAGES,
    ChatMessage,
    ChatRequest,
    ContentPart,
    Count,
    FunctionCall,
    FunctionDefinition,
    JsonSchema,
    Name,
    NamedFunction,
    NamedTool,
    PromptCacheBreakpoint,
    PromptCacheOptions,
    ResponseFormat,
    Share,
    Temperature,
    Tool,
    ToolCall,
)
from ramify.server.service import Generation, Job, Service
from ramify.server.tools import Call


class InputPart(Struct):
    """A piece of an input message."""

    type: str
    text: str | None = None
    refusal: str | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class InputItem(Struct):
    """A message, a call of a function, or its result."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    id: Name | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


class FunctionTool(Struct):
    """A function, with its fields beside `type`."""

    type: str
    name: Name | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(Struct):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Name = ""
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(Struct):
    """What is asked of the text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ToolChoice(Struct):
    """The function that must be called."""

    type: str
    name: Name | None = None


class Reasoning(Struct):
    """How much the model should think."""

    effort: str | None = None


class ResponsesRequest(Struct, kw_only=True):
    """POST /v1/responses."""

    model: Name | None = None
    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    previous_response_id: Name | None = None
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stream: bool = False
    store: bool | None = None
    background: bool | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    service_tier: str | None = None
    metadata: dict[str, str] | None = None
    truncation: str | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    cache_salt: Annotated[str, Meta(max_length=1024)] | None = None
    user: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """What is kept of a response, for the next one."""

    messages: tuple[ChatMessage, ...]  # the answer included
    text: str  # rendered, with the answer
    ids: array[int]  # of that text, as they were computed
    body: Mapping[str, Any]  # as the client got it


def as_chat(request: ResponsesRequest, before: Turn | None) -> ChatRequest:
    """The same as a chat request.

    Raises:
        ApiError: something is asked that is not served.
    """
    if request.background:
        raise ApiError(400, "background responses are not served; leave it out", param="background")
    messages: list[ChatMessage] = []
    if request.instructions:
        messages.append(ChatMessage("system", request.instructions))
    if before is not None:  # instructions are those of the new request alone
        old = before.messages
        messages += old[1:] if old and _is_instruction(old[0]) else old
    if isinstance(request.input, str):
        messages.append(ChatMessage("user", request.input))
    else:
        for at, item in enumerate(request.input):
            _add(messages, item, f"input[{at}]")
    tools = [_tool(one, f"tools[{at}]") for at, one in enumerate(request.tools or ())]
    options = request.text or TextOptions()
    return ChatRequest(
        model=request.model,
        messages=messages,
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        logprobs=request.top_logprobs is not None or None,
        top_logprobs=request.top_logprobs,
        stream=request.stream,
        tools=tools or None,
        tool_choice=_choice(request.tool_choice),
        response_format=_form(options.format),
        verbosity=options.verbosity,
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        service_tier=request.service_tier,
        prompt_cache_key=request.prompt_cache_key,
        prompt_cache_options=request.prompt_cache_options,
        cache_salt=request.cache_salt,
    )


def _is_instruction(message: ChatMessage) -> bool:
    return message.name == INSTRUCTIONS


INSTRUCTIONS = "ramify:instructions"


def _add(messages: list[ChatMessage], item: InputItem, where: str) -> None:
    if item.type == "message":
        if item.role is None:
            raise ApiError(400, "a message needs a role", param=f"{where}.role")
        content: str | list[ContentPart] | None
        if isinstance(item.content, list):
            content = [
                ContentPart(part.type, part.text, part.refusal, part.prompt_cache_breakpoint)
                for part in item.content
            ]
        else:
            content = item.content
        messages.append(ChatMessage(item.role, content))
    elif item.type == "function_call":
        if item.name is None:
            raise ApiError(400, "a call needs a name", param=f"{where}.name")
        call = ToolCall(FunctionCall(item.name, item.arguments or "{}"), item.call_id or "")
        if messages and messages[-1].role == "assistant":
            last = messages[-1]
            calls = [*(last.tool_calls or ()), call]
            messages[-1] = msgspec.structs.replace(last, tool_calls=calls)
        else:
            messages.append(ChatMessage("assistant", "", tool_calls=[call]))
    elif item.type == "function_call_output":
        text = item.output
        if isinstance(text, list):
            text = "\n".join(part.text or "" for part in text)
        messages.append(ChatMessage("tool", text or "", tool_call_id=item.call_id))
    elif item.type != "reasoning":
        raise ApiError(
            400, f"input of type {item.type!r} is not served; send messages", param=f"{where}.type"
        )


def _tool(tool: FunctionTool, where: str) -> Tool:
    if tool.type != "function" or tool.name is None:
        raise ApiError(400, f"tools of type {tool.type!r} are not served", param=f"{where}.type")
    return Tool(FunctionDefinition(tool.name, tool.description, tool.parameters, tool.strict))


def _choice(choice: object) -> Any:
    if not isinstance(choice, ToolChoice):
        return choice
    if choice.type != "function" or choice.name is None:
        raise ApiError(400, f"a choice of {choice.type!r} is not served", param="tool_choice.type")
    return NamedTool(NamedFunction(choice.name))


def _form(form: TextFormat | None) -> ResponseFormat | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return ResponseFormat("json_object")
    return ResponseFormat("json_schema", JsonSchema(form.name, form.schema or {}))


def response_job(
    request: ResponsesRequest, before: Turn | None, service: Service
) -> tuple[ChatRequest, Job]:
    """A request for a response as a job; the tokens of the turns before are those computed then.

    Raises:
        ApiError, RequestError: it cannot be served.
    """
    chat = as_chat(request, before)
    known = None if before is None else (before.text, before.ids)
    return chat, chat_job(chat, service, known=known)


class ResponseAnswer:
    """The answer to a request for a response."""

    def __init__(
        self,
        service: Service,
        request: ResponsesRequest,
        chat: ChatRequest,
        generation: Generation,
    ) -> None:
        self.service, self.request, self.chat = service, request, chat
        self.generation = generation
        self.inner = ChatAnswer(service, chat, generation)
        self.message_id = f"msg_{secrets.token_hex(16)}"

    @property
    def _choice(self) -> Any:
        return self.inner.choices[0]

    def _body(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        request = self.request
        options = request.prompt_cache_options
        return {
            "id": self.generation.id,
            "object": "response",
            "created_at": self.generation.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": self.service.model,
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": self.chat.reasoning_effort, "summary": None},
            "store": request.store is not False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "text": {"format": {"type": "text"}}
            if request.text is None
            else msgspec.to_builtins(request.text),
            "tool_choice": msgspec.to_builtins(request.tool_choice or "auto"),
            "tools": msgspec.to_builtins(request.tools or []),
            "truncation": "disabled",
            "metadata": request.metadata or {},
            "prompt_cache_key": request.prompt_cache_key,
            "prompt_cache_options": None
            if options is None
            else {
                "mode": options.mode,
                "ttl": options.ttl,
                "comparison_response_id": options.comparison_response_id,
            },
            "usage": None,
        }

    def _usage(self) -> dict[str, Any]:
        told = self.inner.usage()
        details = told.get("prompt_tokens_details", {})
        made = {
            "input_tokens": told["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": details.get("cached_tokens", 0),
                "cache_write_tokens": details.get("cache_write_tokens", 0),
            },
            "output_tokens": told["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": told["total_tokens"],
        }
        return made | ({"ramify_cache": told["ramify_cache"]} if "ramify_cache" in told else {})

    def _end(self) -> dict[str, Any]:
        """The whole response."""
        cut = self._choice.finish == "length"
        show = self.generation.job.answer
        output: list[dict[str, Any]] = []
        if show and (self._choice.text or not self._choice.calls):
            output.append(self._message(self._choice.text, "incomplete" if cut else "completed"))
        output += [self._call(call, "completed") for call in self._choice.calls]
        body = self._body("incomplete" if cut and show else "completed", output)
        if cut and show:
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        body["completed_at"] = self.generation.created
        body["usage"] = self._usage()
        return body | self.inner.diagnostics()

    def _message(self, text: str, status: str) -> dict[str, Any]:
        return {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [self._part(text)] if status != "in_progress" else [],
        }

    def _part(self, text: str) -> dict[str, Any]:
        logprobs = self.inner.logprobs(self._choice.logprobs)
        told = [] if logprobs is None or not text else logprobs["content"]
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": told}

    @staticmethod
    def _call(call: Call, status: str) -> dict[str, Any]:
        return {
            "id": call.id.replace("call_", "fc_", 1),
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments if status == "completed" else "",
            "status": status,
        }

    async def whole(self) -> dict[str, Any]:
        """`response`."""
        async for event in self.generation:
            self.inner.choices[event.index].add(event)
        self.generation.raise_error()
        return self._end()

    def turn(self, body: Mapping[str, Any]) -> Turn | None:
        """What the next response can go on from; after the end."""
        output = self.generation.output
        if output is None or self.request.store is False:
            return None
        choice, ids = self._choice, list(output.completions[0].token_ids)
        calls = [
            ToolCall(FunctionCall(call.name, call.arguments), call.id) for call in choice.calls
        ]
        answer = ChatMessage("assistant", choice.text, tool_calls=calls or None)
        messages = list(self.chat.messages)
        if self.request.instructions:
            messages[0] = msgspec.structs.replace(messages[0], name=INSTRUCTIONS)
        if isinstance(output.completions[0].stop_reason, int):
            ids = ids[:-1]  # the template writes the end itself
        prompt = self.generation.job.prompt
        text = output.completions[0].text
        return Turn((*messages, answer), prompt.text + text, prompt.ids + array("i", ids), body)

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Server-sent events, numbered."""
        number = 0

        def event(kind: str, **fields: Any) -> dict[str, Any]:
            nonlocal number
            number += 1
            return {"type": f"response.{kind}", "sequence_number": number - 1} | fields

        body = self._body("in_progress", [])
        yield event("created", response=body)
        yield event("in_progress", response=body)
        place, is_open, show = 0, False, self.generation.job.answer
        where = {"item_id": self.message_id, "output_index": 0, "content_index": 0}
        async for step in self.generation:
            text, calls = self._choice.add(step)
            if not show:
                continue
            if text:
                if not is_open:
                    is_open = True
                    where["output_index"] = place
                    item = self._message("", "in_progress")
                    yield event("output_item.added", output_index=place, item=item)
                    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                    yield event("content_part.added", **where, part=part)
                yield event("output_text.delta", **where, delta=text, logprobs=[])
            if calls and is_open:
                for told in self._closed(event, where, "completed"):
                    yield told
                place, is_open = place + 1, False
            for call in calls:
                item = self._call(call, "in_progress")
                yield event("output_item.added", output_index=place, item=item)
                told = {"item_id": item["id"], "output_index": place}
                yield event("function_call_arguments.delta", **told, delta=call.arguments)
                yield event(
                    "function_call_arguments.done",
                    **told,
                    name=call.name,
                    arguments=call.arguments,
                )
                item = self._call(call, "completed")
                yield event("output_item.done", output_index=place, item=item)
                place += 1
        self.generation.raise_error()
        end = self._end()
        if is_open:
            status = "incomplete" if end["status"] == "incomplete" else "completed"
            for told in self._closed(event, where, status):
                yield told
        yield event(end["status"], response=end)

    def _closed(self, event: Any, where: dict[str, Any], status: str) -> list[dict[str, Any]]:
        text = self._choice.text
        item = self._message(text, status)
        return [
            event("output_text.done", **where, text=text, logprobs=[]),
            event("content_part.done", **where, part=self._part(text)),
            event("output_item.done", output_index=where["output_index"], item=item),
        ]
