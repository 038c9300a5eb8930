"""The report of a log: terminal summary, JSON, HTML, SARIF, comparison, budget, anonymous trace.

`analyze` computes an `Analysis`; everything else here shows one. `page/` has the template, style and
script of the HTML file.
"""
