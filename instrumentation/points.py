"""Where the hook reaches into vLLM: hook points as data, the one place to add a vLLM version.

A point that a vLLM version lacks costs the phases named in ``gives`` and nothing else; it is
reported once when the process starts to record.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SUPPORTED_VLLM: Final = ">=0.11"
TESTED_VLLM: Final = ("0.32.0",)


@dataclass(frozen=True, slots=True)
class Point:
    """``module.owner.attribute`` is wrapped by the method ``make`` of the ``hook`` named.

    ``hook`` is ``frontend``, ``core`` or ``worker``; ``argument`` is passed to ``make`` first when
    it is not None. ``optional`` points exist in some versions only and are not reported missing.
    """

    name: str
    hook: str
    module: str
    owner: str
    attribute: str
    make: str
    gives: str
    argument: str | bool | None = None
    optional: bool = False


_RENDERERS = ("hf", "mistral", "deepseek_v32", "deepseek_v4", "cohere", "kimi_k3", "inkling", "terratorch")
_RENDERER_CLASSES = {
    "hf": "HfRenderer", "mistral": "MistralRenderer", "deepseek_v32": "DeepseekV32Renderer",
    "deepseek_v4": "DeepseekV4Renderer", "cohere": "CohereRenderer", "kimi_k3": "KimiK3Renderer",
    "inkling": "InklingRenderer", "terratorch": "TerratorchRenderer",
}  # fmt: skip

POINTS: Final[tuple[Point, ...]] = (
    Point(
        "frontend.asgi",
        "frontend",
        "starlette.applications",
        "Starlette",
        "__call__",
        "make_asgi",
        "arrival, body, first byte, every flush, last byte, traceparent",
    ),
    Point(
        "frontend.engine_init",
        "frontend",
        "vllm.v1.engine.async_llm",
        "AsyncLLM",
        "__init__",
        "make_engine_init",
        "the served model's name",
    ),
    Point(
        "frontend.engine_init",
        "frontend",
        "vllm.v1.engine.llm_engine",
        "LLMEngine",
        "__init__",
        "make_engine_init",
        "the served model's name",
    ),
    Point(
        "frontend.submit",
        "frontend",
        "vllm.v1.engine.output_processor",
        "OutputProcessor",
        "add_request",
        "make_submit",
        "end of preprocessing; ties engine requests to the HTTP request",
    ),
    Point(
        "frontend.process_outputs",
        "frontend",
        "vllm.v1.engine.output_processor",
        "OutputProcessor",
        "process_outputs",
        "make_process_outputs",
        "output processing and detokenising",
    ),
    Point(
        "frontend.abort",
        "frontend",
        "vllm.v1.engine.output_processor",
        "OutputProcessor",
        "abort_requests",
        "make_abort",
        "aborts of requests that no HTTP server holds",
    ),
    Point(
        "frontend.get_output",
        "frontend",
        "vllm.v1.engine.core_client",
        "AsyncMPClient",
        "get_output_async",
        "make_get_output",
        "which data parallel engine an output comes from",
    ),
    *(
        Point(
            "frontend.template",
            "frontend",
            f"vllm.renderers.{module}",
            _RENDERER_CLASSES[module],
            "render_messages_async",
            "make_phase",
            "chat template",
            "template",
            optional=module != "hf",
        )
        for module in _RENDERERS
    ),
    Point(
        "frontend.tokenize",
        "frontend",
        "vllm.renderers.base",
        "BaseRenderer",
        "tokenize_prompts_async",
        "make_phase",
        "tokenizer",
        "tokenize",
    ),
    Point(
        "frontend.tokenize",
        "frontend",
        "vllm.renderers.base",
        "BaseRenderer",
        "tokenize_prompts",
        "make_phase",
        "tokenizer (offline)",
        "tokenize",
        optional=True,
    ),
    Point(
        "core.preprocess_add_request",
        "core",
        "vllm.v1.engine.core",
        "EngineCore",
        "preprocess_add_request",
        "make_preprocess",
        "arrival in the engine core; the trace id",
    ),
    Point(
        "core.add_request",
        "core",
        "vllm.v1.engine.core",
        "EngineCore",
        "add_request",
        "make_add_request",
        "entry into the waiting queue",
    ),
    Point("core.step", "core", "vllm.v1.engine.core", "EngineCore", "step", "make_step", "every step", False),
    Point(
        "core.step",
        "core",
        "vllm.v1.engine.core",
        "EngineCore",
        "step_with_batch_queue",
        "make_step",
        "every step under asynchronous scheduling and pipeline parallelism",
        True,
    ),
    Point(
        "core.process_input_queue",
        "core",
        "vllm.v1.engine.core",
        "EngineCoreProc",
        "_process_input_queue",
        "make_input_queue",
        "time between steps spent on new requests",
    ),
    Point(
        "worker.wrapper",
        "worker",
        "vllm.v1.worker.worker_base",
        "WorkerWrapperBase",
        "execute_model",
        "make_first_execute",
        "execution of each step on each rank",
    ),
)

# Wrapped on the instances that the first step finds, since their classes are configurable.
INSTANCE_POINTS: Final = {
    "core.schedule": "scheduler.schedule",
    "core.execute_model": "model_executor.execute_model",
    "core.update_from_output": "scheduler.update_from_output",
    "core.finish_requests": "scheduler.finish_requests",
    "core.preempt_request": "scheduler._preempt_request (from vLLM 0.14)",
    "worker.execute_model": "worker.execute_model",
    "worker.sample_tokens": "worker.sample_tokens (from vLLM 0.14)",
}
