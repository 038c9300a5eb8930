"""What a change would save: the log is mended, replayed under the same rule, and compared.

`mending` makes the prompts without a set of causes (`mended_tools`, `mended_units`, `repeated_blocks`,
`unseen_parts`),
`breakpoint_fixes` places breakpoints, `measure` replays both logs; `components` splits a log into parts
that share nothing, so that a fix is replayed where it applies.
"""

from ramify.analysis.savings.measure import AppliedFix, MendedLike, MenderLike, measure_savings

__all__ = ["AppliedFix", "MendedLike", "MenderLike", "measure_savings"]
