"""What a change would save: the log is mended, replayed under the same rule, and compared.

1. `measure` replays the log as it is and mended, and counts what is read more.
2. `fixing` makes the prompts without a set of causes; `mended_units` and
   `repeated_blocks` each mend one kind of part.
3. `breakpoint_fixes` places breakpoints and takes them away.
4. `components` splits a log into parts that share nothing, so that a fix is replayed where it applies.
"""
