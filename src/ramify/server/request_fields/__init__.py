"""Request fields that several APIs have in common.

- `reasoning_options`: reasoning effort and budget as each API spells them.
- `unsupported_fields`: fields outside of a request's type: refused, ignored or unknown.
- `opaque_text`: texts that a client sends back without reading them, as `encrypted_content`.

`context`, `service`, `conversation`, `operations.cache_admin` and the APIs import it. It imports `errors`
and `http` only.
"""
