"""Scheduling: which requests a step runs, and the plan of that step. No torch, no tokenizer.

Read `validation` and `queue_limits` (check a request before it is queued), `waiting_queue` (the order
of waiting requests), `prefill` (prompt chunks and admissions of one step), `row_fairness` (rows for
tenants that starve), `scheduler` (the whole step: decodes, prefill, preemption), `step_plan` (turns
the scheduled step into the executor's `StepPlan`).

For `engine.context` and what is above it. `validation` is also for the server and `cache_admin`.
"""
