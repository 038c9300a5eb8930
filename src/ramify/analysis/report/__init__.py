"""The report of `ramify analyze`.

Read `document` (the report as values) and `analyze` (fills it) first, then the rooms:

1. `figures` compute the parts from requests, verdicts and predictions.
2. `wording` puts numbers and causes into words, the same in all formats.
3. `writers` write it: terminal, JSON, Markdown, Mooncake trace. `page` is the HTML page.

`privacy` takes the log's texts out. `comparison` compares two runs, `budget` checks one against limits.
"""
