"""Execution of step plans with torch.

With `exactness_check`, the only part of the engine that imports torch.

In reading order:

    assembly        `LocalEngine`: config, weights, KV pool, attention backend, runner and core from a
                    checkpoint; loads new weights
    executors       the executor of an engine's steps, by options and device
    local_executor  `LocalExecutor`: runs a `StepPlan` in this process; finds out-of-memory errors
                    and values that are not finite
    runner          `ModelRunner`: batch arrays to tensors, one forward pass over the paged K/V
    sampler         logits to tokens and log probabilities (numpy)
    device          the device of an engine, by its option; what is refused elsewhere than on a CPU
    host_memory     bytes that this process may still allocate

`llm` and `async_llm` import `assembly` when a checkpoint is loaded, so that `import ramify` stays
free of torch. The core knows an executor only by the protocol `step.Executor`.
"""
