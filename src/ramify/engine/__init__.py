"""The engine: continuous batching around the prefix cache. `LLM` and `AsyncLLM` are its public interfaces.

A request's way: `core.add_request` validates and queues it → `scheduler.schedule` chooses the
step's requests and has `attention.planner` plan their pages → `step_plan` builds the `StepPlan` →
the executor runs the model and samples → `result_processor` commits the K/V and updates the
requests → `lifecycle.emit` collects a `StepOutput` for the caller.

In reading order. A line imports only lines above it; names in a line with `|` are independent:

- `prefix_namespaces` (which tenants share prefixes) `| request_options` (priority, tenant, cache
  options) `| stop_strings | text/` (tokenizer, chat templates, detokenizer) `| watchdog` (stuck
  steps) `| call_turns` (calls of several threads) `| description` (what a server says of it)
  `| identity` (what the bits of answers depend on)
- `logits/` (logits processors, grammars) `| cache_options` (pins, shares) `| embedding`
- `request | step`: the values that everything else passes around
- `scheduling/` (which requests a step runs) `| speculation/` (draft tokens for them)
  `| output_processor` (tokens to text, ends) `| hit_verifier` (idle-time check of cache hits)
- `context`: cache, block table, planner, scheduler and executor, resettable as one object
- `lifecycle`: creates, emits, finishes and fails requests
- `failure_recovery`: roll-back, isolation, rebuild
- `result_processor`: commits the K/V of a step, appends its tokens, emits outputs
- `core`: the step loop
- `execution/` (runner, sampler, assembly; imports torch) `| serving/` (engine thread, streams)
  `| offline` (batch driver) `| weight_reload`
- `cache_admin/`: what operators see and do
- `sessions/`: conversations
- `llm | async_llm`: what users call
- `exactness_check`: `ramify verify`

`server`, `cli`, `testing` and `analysis` import the engine; it imports every package below but
`kernels`.
"""
