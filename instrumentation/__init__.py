"""The hook: records vLLM's model, framework and GPU layers under the request's own trace id.

vLLM loads :func:`stratoscope.instrumentation.plugin.load` in every one of its processes through
the entry point group ``vllm.general_plugins``. Without an OTLP endpoint configured it does nothing.
"""
