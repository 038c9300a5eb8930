"""From a `Conversation` to the `GenerationRequest` that the engine gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ramify.errors import InvalidParamsError
from ramify.server.conversation.conversation import Conversation, ToolDefinition
from ramify.server.conversation.moved_text import apply_rules
from ramify.server.conversation.named_prefix import with_prefix, with_span
from ramify.server.conversation.parts import media_of, unanswered_media
from ramify.server.errors import ApiError
from ramify.server.generation import GenerationRequest
from ramify.server.grammars.constraint import FORMAT_PARAMS, OfferedTool, refused_format
from ramify.server.history.stored_requests import HistoryEntry, fingerprint
from ramify.server.prompts.content_placeholders import media_refusal, placeholder_warnings
from ramify.server.prompts.prompt_parts import tool_part
from ramify.server.prompts.role_order import joined
from ramify.server.service import RequestService


def to_generation(
    conversation: Conversation, service: RequestService, tenant: str = ""
) -> GenerationRequest:
    """Translate a conversation for the engine: prompt, grammar, parser of the answer.

    Args:
        tenant: see `PromptRenderer.chat`.

    Raises:
        ApiError, RequestError: it cannot be served.
    """
    entry, warnings = rendered(conversation, service, tenant)
    choice, answer_format = conversation.choice, conversation.answer_format
    tools, turn_opening = conversation.callable_tools, entry.prompt.turn_opening
    try:
        structured = service.constraints.of_answer(
            [OfferedTool.of(tool.function, tool.path) for tool in tools],
            choice,
            prompt_end=turn_opening,
            tenant=tenant,
            answer_format=answer_format,
            warnings=warnings,
        )
    except InvalidParamsError as error:
        field = "tool_choice" if choice.is_forced else conversation.format_path
        if field and error.name in FORMAT_PARAMS:
            raise refused_format(error, field) from error
        raise
    params = replace(conversation.sampling, structured=structured)
    if not tools and _shown_tools(conversation, service):
        params = service.constraints.without_calls(params, tenant)
    output_format = service.output_format
    if params.keep_special_tokens is not True:  # the client wants all of them
        params = replace(params, keep_special_tokens=output_format.kept_special_tokens)
    new_parser = partial(
        output_format.new_parser,
        [tool.name for tool in tools],
        prompt_end=turn_opening,
        forced=choice.is_forced,
        is_streamed=conversation.is_streamed,
        has_format=answer_format is not None,
        schemas={tool.name: tool.function["parameters"] for tool in tools},
    )
    return GenerationRequest(
        entry,
        params,
        salt=conversation.cache.salt,
        session=conversation.cache.session,
        ends_session=conversation.cache.ends_session,
        priority=conversation.priority,
        is_prewarm=conversation.is_prewarm,
        is_chat=True,
        is_remembered=conversation.is_remembered,
        warnings=tuple(warnings),
        new_parser=new_parser,
        ends_after_call=choice.is_single,
    )


def within_context(request: GenerationRequest, service: RequestService) -> GenerationRequest:
    """The request without a limit of output tokens that exceeds the room that the prompt leaves.

    Agents send the same large limit with every request, whatever the context of the model is.
    """
    config, params = service.engine.config, request.params
    room = min(config.max_model_len, config.kv_cache_tokens) - len(request.prompt.ids)
    if params.max_tokens is None or params.max_tokens <= room:
        return request
    return replace(request, params=replace(params, max_tokens=None))


def rendered(
    conversation: Conversation, service: RequestService, tenant: str = ""
) -> tuple[HistoryEntry, list[str]]:
    """Render the prompt of a conversation.

    Returns:
        the prompt, as an entry of the request history, and the warnings so far.

    Raises:
        ApiError, RequestError: it cannot be served.
    """
    conversation = apply_rules(with_prefix(conversation), service.prompt_rules)
    messages = conversation.messages
    if (unread := unanswered_media(messages)) is not None:
        raise media_refusal(
            unread.path, unread.kind, model=conversation.model, wrapper=service.wrapper
        )
    media = [*media_of(messages)]
    warnings = placeholder_warnings((part.path, part.kind) for part in media)
    warnings += conversation.warnings
    translated = [message.as_template() for message in messages]
    prompt_messages = [message for group in translated for message in group]
    if conversation.joins_roles:
        prompt_messages = joined(prompt_messages)
    system = [] if conversation.system is None else conversation.system.as_template()
    prompt_messages = [*system, *prompt_messages]
    if not prompt_messages:
        raise ApiError(400, "there is nothing to answer in them", param="messages")
    continues_answer = conversation.continues_answer
    if continues_answer is None:
        continues_answer = prompt_messages[-1]["role"] == "assistant"
    shown = _shown_tools(conversation, service)
    definitions = [tool.as_template for tool in shown]
    parts = [tool_part(tool.path, tool.ttl_s) for tool in shown]
    for message in (conversation.system, *messages):
        parts += () if message is None else message.prompt_parts()
    names = service.tokenizer.chat_template_names
    variables = conversation.reasoning.template_variables(names)
    prompt = service.prompt_renderer.chat(
        prompt_messages,
        parts,
        tools=definitions or None,
        continue_final_message=continues_answer,
        add_generation_prompt=conversation.opens_answer,
        known=conversation.known,
        tenant=tenant,
        template_options={**variables, **conversation.template_variables},
    )
    prompt = prompt.with_turns([(message.path, message.role) for message in messages])
    if conversation.max_prompt_tokens is not None:
        prompt = prompt.last_tokens(conversation.max_prompt_tokens)
    placeholders = tuple(part.path for part in media)
    prompt = replace(prompt, rules=conversation.applied, placeholders=placeholders)
    prompt = with_span(conversation, conversation.cache.with_breakpoints(prompt), warnings)
    entry = HistoryEntry(
        model=conversation.model,
        options=conversation.compared,
        tools=tuple(fingerprint(definition) for definition in definitions),
        system=fingerprint(system),
        messages=tuple(fingerprint(group) for group in translated),
        prompt=prompt,
        paths=_paths(conversation),
        max_shared=conversation.cache.max_shared(prompt),
    )
    return entry, warnings


def _shown_tools(conversation: Conversation, service: RequestService) -> Sequence[ToolDefinition]:
    """The tools that the prompt has."""
    return conversation.callable_tools if service.drops_forbidden_tools else conversation.tools


def _paths(conversation: Conversation) -> tuple[str, ...]:
    """The request fields of the messages; () where they are `messages[i]`."""
    paths = tuple(message.path for message in conversation.messages)
    is_usual = all(path == f"messages[{index}]" for index, path in enumerate(paths))
    return () if is_usual else paths
