"""Replays of a trace in real code.

`cache_replay` runs `PrefixCache`. `engine_replay` runs `EngineCore`, with a clock that advances by the
`cost_model`, whose constants `calibration` measures.
"""
