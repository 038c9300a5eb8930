"""What a change would save: the log is mended, replayed under the same rule, and compared."""

from ramify.analysis.savings.measure import AppliedFix, MendedLike, MenderLike, measure_savings

__all__ = ["AppliedFix", "MendedLike", "MenderLike", "measure_savings"]
