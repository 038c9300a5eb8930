"""How a request differs from an earlier one, segment by segment, and which differences are waste.

Read `comparing` first: it compares settings and tools, then hands system and messages to
`message_walk`, which walks both prompts side by side (`prompt_sides`) and asks `pair_outcome` about two
segments in the same place. `history_changes`, `hoisted_notes`, `summaries` and `context_blocks` know
what clients do to a history, `continuations` which requests are of the same conversation. Texts:
`text_diff` aligns two, `normal_forms` makes equal what differs in layout only, `quoting` cuts a quote.
"""
