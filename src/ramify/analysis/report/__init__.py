"""What an analysis looks like: terminal, JSON, Markdown, HTML and SARIF.

`analyze` runs lint, simulation and sharing over a log and fills a `document`; `headline`, `rates`,
`reads`, `sessions`, `prefix_tree`, `cache_curves`, `what_if` and `provenance` compute its parts,
`causes_text` and `wording` word them, `privacy` takes the texts out. It is written by `terminal`,
`as_json`, `markdown`, `sarif` and `html` (`page_rows`, `charts`, templates in `page/`). `comparison`
compares two documents, `budget` checks one against limits, `trace_export` writes a Mooncake trace.
"""
