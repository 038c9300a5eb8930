"""Sessions: prompts that grow turn by turn, branch and go back.

In reading order:

    transcript  what was said so far: token ids, or messages with the token ids that were computed
    session     `Session` over an `LLM`, `AsyncSession` and `SessionStream` over an `AsyncLLM`

`session` names what it calls of the two by protocols, so it imports neither. `llm` and `async_llm`
import this package, and nothing below it does.
"""
