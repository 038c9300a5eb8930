"""Published traces without text: block hashes (Mooncake, Bailian, Weka, Dynamo), or lengths only.

`trace_columns` is the table of their keys; `hashed_prompts` reads ids of blocks.
"""
