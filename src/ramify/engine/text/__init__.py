"""Text to token ids and back; the only package of the engine that imports tokenizers and Jinja.

In reading order:

    tokenizer            `tokenizer.json` of a checkpoint: encode, decode, special tokens
    tokenizer_files      finds that file, or converts another: ranked_bpe, sentencepiece_model
    gguf_tokenizer       makes that of a GGUF file, with its split_patterns and chat templates
    tokenizer_limits     what a `tokenizer.json` may add to texts and to the vocabulary
    added_tokens         tokens that the checkpoint's other files name (`tokenizer_config.json`, ...)
    special_tokens       escapes special tokens in user text, so that they stay text
    token_bytes          bytes of single tokens
    chat_template        renders messages with the checkpoint's Jinja template, sandboxed
    template_limits      processor time and sizes that a template may use
    template_sizes       sizes of a template's values as trees
    end_tokens           end of text, and the end of a turn of the chat template
    detokenizer          the text of an answer, token by token
    incremental_encoder  tokenises only the new end of a conversation
    prompt_inputs        a prompt in any form (text, token ids, messages) to token ids
    tenant_lru           an LRU cache bounded for each tenant and in all

Imports nothing else of the engine; everything above it and the server may import it.
"""
