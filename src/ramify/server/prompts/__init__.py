"""Prompts: from messages to token ids, by the chat template of the checkpoint.

In reading order:

- `renderer`: `PromptRenderer`, which renders and tokenises; `RenderedPrompt`, its result.
- `template_conventions`: adapts messages in OpenAI's form to the form that a template reads;
  `template_probes` finds that form by renderings, `role_order` orders roles for it.
- `prompt_parts`: request fields and where they stand in the text, found by `text_spans`;
  `tool_forms`: how templates write a tool.
- `next_turns`: how much of a prompt the next one begins with.
- `answer_opening`: where the answer begins in a rendered prompt; prefills.
- `prompt_ends`: both of these without a rendering, for conversations of a known shape.
- `template_tests`: what chat templates test in a conversation, read from their sources.
- `content_placeholders`: texts in place of images, audio and files.
- `jobs`: threads that render and tokenise, shared fairly among tenants.

`history`, `generation`, `service`, `conversation`, `context`, `app`, `operations.cache_admin` and the APIs
import it. It imports `errors` and `model_dialects` only.
"""
