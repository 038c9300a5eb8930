"""Parts of the report, computed from a linted log.

`reads` counts tokens of each request. From these come `rates` (hit rates and waterfall) and
`prefix_tree`. `sessions` has timelines, `cache_curves` hit rates by capacity and lifetime.
`quality_warnings` says what makes the numbers unsure.
"""
