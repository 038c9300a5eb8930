"""What a model's output means: text, reasoning and tool calls, by the format of its family.

Read `events` (what a parser yields) first. Imported by the rest of `server`; imports nothing of it.
"""
