"""Request and response bodies of the OpenAI, Anthropic and Gemini APIs.

`request_bodies` recognises an API by its keys; a file for each API turns a body into `segments`;
`responses`, `sse` and `usage` read what came back; `exchanges` joins the two. The formats: bodies as
people log them (`wrapped_bodies`), and batches.
"""
