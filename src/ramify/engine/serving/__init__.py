"""The engine thread, and the streams that carry its outputs to asyncio event loops.

In reading order:

    streams        `Stream`, the reader's side; `OutputCollector`, the unread outputs of a request;
                   `LoopDispatcher`, which carries outputs from the engine thread to an event loop
    engine_thread  `EngineThread`: runs commands and steps of an `EngineCore` in a thread of its own

The way of an output: `EngineThread._step` → `LoopDispatcher.put`, `flush` → (event loop)
`OutputCollector.receive`, `wake` → `Stream.__anext__`. `async_llm`, `sessions` and the
server import this package.
"""
