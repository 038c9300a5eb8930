"""Read requests of /api/generate: a question to the chat template, or with `raw` a plain prompt.

`context` of an earlier answer holds the token ids of its prompt and text. A request with it goes on from
exactly these ids, so that they are read from the cache: the chat template is rendered with a stand-in for
the conversation so far, and what it writes behind that follows the ids.
"""

from __future__ import annotations

from dataclasses import replace

from ramify.errors import PromptTooLongError
from ramify.server.conversation.conversation import Conversation
from ramify.server.conversation.parts import Message, TextPart
from ramify.server.conversation.to_generation import to_generation, within_context
from ramify.server.errors import ApiError
from ramify.server.generation import GenerationRequest
from ramify.server.history.stored_requests import HistoryEntry, fingerprint
from ramify.server.ollama.chat_request import images_of
from ramify.server.ollama.options import read_options
from ramify.server.ollama.protocol import GenerateRequest
from ramify.server.openai.completions import encode_text, read_token_ids
from ramify.server.prompts.content_placeholders import media_refusal
from ramify.server.prompts.renderer import PromptSegment, RenderedPrompt
from ramify.server.service import RequestService

# Stand for the conversation so far; the prompt has neither.
EARLIER_QUESTION = Message("", "user", (TextPart("", ("question",)),))
EARLIER_ANSWER = Message("context", "assistant", (TextPart("context", ("earlier-answer",)),))


def generate_to_generation(
    request: GenerateRequest, service: RequestService, tenant: str = ""
) -> GenerationRequest:
    """Translate a generate request for the engine.

    Raises:
        ApiError, RequestError: it cannot be served.
    """
    options = read_options(request, service)
    _refuse_fields(request, options.model, service)
    if request.raw:
        return within_context(_plain_request(request, options, service), service)
    texts = (request.prompt or "", request.system or "")
    num_bytes = sum(len(text.encode("utf-8", "replace")) for text in texts)
    service.check_prompt_bytes(num_bytes, "prompt")
    earlier = (EARLIER_QUESTION, EARLIER_ANSWER) if request.context else ()
    system = TextPart("system", (request.system,) if request.system else ())
    question = TextPart("prompt", (request.prompt or "", *images_of(request.images)))
    messages = (
        *earlier,
        *([Message("system", "system", (system,))] if system.lines else []),
        Message("prompt", "user", (question,)),
    )
    generation_request = to_generation(replace(options, messages=messages), service, tenant)
    if request.context:
        generation_request = _continued(generation_request, request.context, service)
    return within_context(_shared_whole(generation_request), service)


def _refuse_fields(request: GenerateRequest, model: str, service: RequestService) -> None:
    """Raise ApiError for fields that are not served, or exclude each other."""
    if request.raw and request.images:
        raise media_refusal("images[0]", "image", model=model, wrapper=service.wrapper)
    if request.suffix:
        raise ApiError(400, f'"{model}" does not support insert; leave it out', param="suffix")
    if request.raw and (request.template or request.system or request.context):
        raise ApiError(400, "raw mode does not support template, system, or context", param="raw")
    if request.template:
        raise ApiError(
            400,
            "the model's own chat template is used; leave it out, or send a whole prompt with raw: true",
            param="template",
        )


def _plain_request(
    request: GenerateRequest, options: Conversation, service: RequestService
) -> GenerationRequest:
    """A prompt without chat template; special tokens in it are read as such."""
    text = request.prompt or ""
    ids = encode_text(text, service, add_special_tokens=True)
    return _request_of(RenderedPrompt(ids, num_stable_tokens=len(ids)), text, options)


def _request_of(prompt: RenderedPrompt, text: str, options: Conversation) -> GenerationRequest:
    entry = HistoryEntry(
        model=options.model,
        options={},
        messages=(fingerprint(text),),
        prompt=prompt,
        paths=("prompt",),
    )
    return GenerationRequest(
        entry,
        replace(options.sampling, structured=options.answer_format),
        salt=options.cache.salt,
        session=options.cache.session,
        ends_session=options.cache.ends_session,
        priority=options.priority,
        is_prewarm=options.is_prewarm,
        is_remembered=options.is_remembered,
        format_path=options.format_path,
        warnings=options.warnings,
    )


def _shared_whole(request: GenerationRequest) -> GenerationRequest:
    """The request with prompt and answer cached as they are: a next one goes on from their ids.

    The next turn of a chat drops the thoughts of this one, and may open the answer otherwise.
    """
    entry = request.history_entry
    prompt = replace(entry.prompt, num_stable_tokens=len(entry.prompt.ids))
    entry = replace(entry, prompt=prompt, max_shared=None)
    return replace(request, history_entry=entry, is_chat=False)


def _continued(
    request: GenerationRequest, context: list[int], service: RequestService
) -> GenerationRequest:
    """The request with the ids of `context` in place of the stand-in.

    Raises:
        ApiError: 400, an item is no token id, or the template shows no earlier answer.
        PromptTooLongError: there are too many.
    """
    if len(context) >= service.max_model_len:
        raise PromptTooLongError(len(context), service.max_model_len)
    ids, prompt = read_token_ids(context, "context"), request.prompt
    cut = next((part.end for part in prompt.segments if part.path == "context"), None)
    if cut is None:
        raise ApiError(
            400,
            "the model's chat template cannot go on from it; send the conversation to /api/chat",
            param="context",
        )
    shift = len(ids) - cut
    continued = replace(
        prompt,
        ids=ids + prompt.ids[cut:],
        text="",
        segments=(
            PromptSegment("context", 0, len(ids)),
            *(
                PromptSegment(part.path, part.start + shift, part.end + shift)
                for part in prompt.segments
                if part.start >= cut
            ),
        ),
        num_earlier_tokens=0,
        tools_behind_system=None,
    )
    return replace(request, history_entry=replace(request.history_entry, prompt=continued))
