"""Any other causal decoder, through transformers, if its prefixes can be cached.

In reading order:

- `config`: `ModelConfig` as transformers reads it, and reasons to refuse.
- `checks`: a probe run: causal, no state but K/V, exact rows.
- `decoder`: `HfDecoder`: transformers' modules with paged attention and our linears.
"""
