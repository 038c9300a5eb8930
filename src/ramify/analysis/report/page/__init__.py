"""The HTML page.

`html` renders the templates and embeds data, style and script. `rows` cuts an analysis to what the
templates draw, `charts` has the geometry of the line charts.
"""
