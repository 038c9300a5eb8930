"""Replays of a trace in real code.

`cache_replay` runs `PrefixCache`. `engine_replay` runs `EngineCore`, with a clock that advances by a
`CostModel`, whose constants `calibration` measures and `cost_model` fits.
"""
