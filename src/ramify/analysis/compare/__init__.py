"""Compare two requests segment by segment: where they differ, and which cause of a lost hit it is.

How `lint` comes to a verdict:

1. `templates` learns which texts are equal but for a few values, and `changing_values` judges each place at
   which they differ from all values seen there, by their shape (`value_shapes`), their behaviour and the
   words around them: a clock, an id, a path or state, another changing value, or content.
2. `predecessor` finds candidates in indexes that grow linearly with the log: radix trees of
   the prompts as sent and as mended, and the newest requests with the same tools, conversation, last
   message or lines. `comparing` compares each candidate exactly.
3. A comparison walks both prompts side by side: settings, `tool_lists`, then system and messages
   (`walk`). At a difference the first row of `rules` that matches names the cause; waste is stepped
   over as if mended, so that what stands behind it shows too. The walk ends at content that
   legitimately differs.
4. What text cannot show is judged by `outside` from times, usage and the provider's cache rule: the
   rules of `timing` and `vendor` read the `evidence` about a request.
5. `prompt_sides` is the view of a prompt that the walk steps over, `pair_outcome` judges two segments in
   the same place; `history`, `hoisted_notes`, `summaries` and `context_blocks` know what clients
   do to a history, `continuations` which requests are of the same conversation. `unit_pairs` has
   the differences within two segments, `spacing` those in white space. `text_diff` aligns two texts,
   `normal_forms` makes equal what differs in layout only, `quoting` cuts a quote.
6. `savings.fixing` makes the prompts as they would be without the causes; `savings.measure` replays them.
"""
