"""Evidence from the GPU: what the device did, when, and what held it back.

* :mod:`.cuda_events`: the device interval of each step, by CUDA events, on the host's clock.
* :mod:`.nvml`: clocks, power, temperature, throttling, memory and links, sampled by one thread;
  :mod:`.nvml_table` says which quantities, :mod:`.devices` which GPUs.

Nothing here is imported at a cost, blocks vLLM, or raises into it. See ``docs/gpu.md``.
"""
