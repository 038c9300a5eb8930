"""The engine: continuous batching around the prefix cache. `LLM` and `AsyncLLM` are its two faces.

A request's way: `core.add_request` validates and queues it → `scheduler.schedule` chooses the
step's requests and has `attention.planner` plan their pages → `step_plan` builds the `StepPlan` →
`executor.execute` runs the model and samples → `core` commits the K/V and updates the requests
→ `lifecycle.emit` collects a `StepOutput` for the caller.

Read in this order:

- `request`, `step`: the values that everything else passes around
- `scheduling/`: which requests a step runs; `speculation/`: draft tokens for them
- `context`: cache, block table, planner, scheduler and executor, resettable as one object
- `lifecycle`: creates, emits, finishes and fails requests; `output_processor`: tokens to text
- `core`: the step loop; `failure_recovery`: what happens when a step or the bookkeeping fails
- `hit_verifier`, `watchdog`, `weight_reload`: idle-time check of hits, stuck steps, new weights
- `prefix_namespaces`: which tenants share prefixes; `logits/`: logits processors and grammars
- `execution/`: runner, sampler and assembly of an engine, the only rooms with torch beside
  `exactness_check`
- `text/`: tokenizer, chat templates, detokenizer
- `offline` behind `llm`; `serving/` behind `async_llm`: the two drivers of the core
- `sessions/`: conversations; `cache_admin/`: what operators see and do; `exactness_check`:
  `ramify verify`

Imports point down this list, independent rooms separated by `|`:

    exactness_check
    llm | async_llm
    sessions
    cache_admin
    serving | offline | weight_reload | execution
    core
    failure_recovery
    lifecycle
    context
    scheduling | speculation | output_processor | hit_verifier
    request | step
    logits
    prefix_namespaces | text | watchdog

Above the engine are only `server`, `cli` and `testing`; below it `config`, `models`, `attention`,
`kv` and `cache`.
"""
