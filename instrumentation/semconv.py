"""The wire contract between the hook and the agent: every name, code and column.

This module is data only and imports nothing but the standard library, so that the hook, the
agent, the attribution and the documentation (``docs/telemetry.md`` is checked against it) share
one definition. OpenTelemetry semantic conventions come first (``gen_ai.*``, ``http.*``,
``service.*``); what they lack lives under ``stratoscope.*``.

Times are integers in nanoseconds of ``CLOCK_MONOTONIC`` (``time.monotonic_ns()``), one clock for
all processes of a host, unless a name says ``wall``. A time of 0 means "not recorded".

Tables travel as one ``bytes`` attribute: row-major little-endian int64, ``len(columns)`` values a
row. The column names travel beside it, so a reader picks columns by name and survives additions.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

SCHEMA_VERSION: Final = 1
SCOPE_NAME: Final = "stratoscope"
ENTRY_POINT_GROUP: Final = "vllm.general_plugins"

# --- resource attributes (beside service.name, service.instance.id, host.name, process.pid) -----
SERVICE_NAME: Final = "service.name"
SERVICE_INSTANCE_ID: Final = "service.instance.id"
PROCESS_UID: Final = "stratoscope.process.uid"  # 16 hex digits, new for each process
CLOCK_DOMAIN: Final = "stratoscope.clock.domain"  # same value = monotonic clocks comparable
WALL_OFFSET_NS: Final = "stratoscope.clock.wall_minus_monotonic_ns"
HOOK_VERSION: Final = "stratoscope.version"
VLLM_VERSION: Final = "stratoscope.vllm.version"
TORCH_VERSION: Final = "stratoscope.torch.version"

# --- what a span is ------------------------------------------------------------------------------
RECORD: Final = "stratoscope.record"


class Record:
    """Values of ``stratoscope.record``: the kinds of span that the hook sends."""

    SERVER: Final = "request.server"  # API server (or offline LLM): one request as its caller saw it
    ENGINE: Final = "request.engine"  # engine core: one engine request (n > 1 gives several)
    WORKER: Final = "request.worker"  # worker rank: one engine request's stay on that rank
    STEPS: Final = "window.steps"  # engine core: a table of steps
    WORKER_STEPS: Final = "window.worker_steps"  # worker rank: a table of step executions
    OUTPUTS: Final = "window.outputs"  # API server: a table of output batches
    OPEN: Final = "window.open"  # API server: requests still open when the window was sent


# --- every record ----------------------------------------------------------------------------------
ROLE: Final = "stratoscope.role"  # api_server | engine_core | worker
ENGINE_UID: Final = "stratoscope.engine.uid"  # 16 hex digits, new for each engine core
ENGINE_INDEX: Final = "stratoscope.engine.index"  # data parallel rank
RANK: Final = "stratoscope.rank"  # global worker rank

# --- request.server --------------------------------------------------------------------------------
API: Final = "stratoscope.api"  # http | async_llm | llm
OUTCOME: Final = "stratoscope.outcome"
STREAMING: Final = "stratoscope.streaming"
T_ARRIVAL: Final = "stratoscope.t.arrival_ns"  # ASGI app called
T_BODY: Final = "stratoscope.t.body_ns"  # last byte of the request body received
T_TEMPLATE_START: Final = "stratoscope.t.template_start_ns"
T_TEMPLATE_END: Final = "stratoscope.t.template_end_ns"
T_TOKENIZE_START: Final = "stratoscope.t.tokenize_start_ns"
T_TOKENIZE_END: Final = "stratoscope.t.tokenize_end_ns"
T_SUBMIT: Final = "stratoscope.t.submit_ns"  # first engine request registered and handed to IPC
T_LAST_BYTE: Final = "stratoscope.t.last_byte_ns"  # last send of the response returned
T_END: Final = "stratoscope.t.end_ns"  # ASGI app returned (abort: when it was cancelled)
FLUSHES: Final = "stratoscope.flushes"  # table FLUSH_COLUMNS: one row a response body send
FLUSHES_DROPPED: Final = "stratoscope.flushes.dropped"
N_ENGINE_REQUESTS: Final = "stratoscope.engine_requests"
ERROR_TYPE: Final = "error.type"

HTTP_METHOD: Final = "http.request.method"
HTTP_ROUTE: Final = "http.route"
HTTP_STATUS: Final = "http.response.status_code"
GEN_AI_OPERATION: Final = "gen_ai.operation.name"
GEN_AI_PROVIDER: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
GEN_AI_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_CHOICE_COUNT: Final = "gen_ai.request.choice.count"
GEN_AI_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
GEN_AI_FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
GEN_AI_INPUT_MESSAGES: Final = "gen_ai.input.messages"  # only with STRATOSCOPE_RECORD_CONTENT=1

FLUSH_COLUMNS: Final = ("start_ns", "end_ns")


class Outcome:
    """Values of ``stratoscope.outcome``."""

    OK: Final = "ok"
    ABORTED: Final = "aborted"  # the client went away
    ERROR: Final = "error"  # an HTTP status >= 400 or an exception
    UNFINISHED: Final = "unfinished"  # the process ended, or was last heard of, with it open


# --- request.engine --------------------------------------------------------------------------------
REQUEST_ID: Final = "stratoscope.request.id"  # vLLM's own request id
T_CORE_RECEIVED: Final = "stratoscope.t.core_received_ns"  # decoded in the core's input thread
T_CORE_PREPROCESSED: Final = "stratoscope.t.core_preprocessed_ns"
T_QUEUED: Final = "stratoscope.t.queued_ns"  # in the scheduler's waiting queue
T_FINISHED: Final = "stratoscope.t.finished_ns"  # end of update_from_output that finished it, or abort
FIRST_STEP: Final = "stratoscope.step.first"  # first step it was scheduled in; -1: never
FIRST_OUTPUT_STEP: Final = "stratoscope.step.first_output"  # step of its first token; -1: none
LAST_STEP: Final = "stratoscope.step.last"  # last step it was scheduled in; -1: never
ARRIVAL_STEP: Final = "stratoscope.step.arrival"  # first step scheduled after it was queued
EVENTS: Final = "stratoscope.events"  # table EVENT_COLUMNS
EVENTS_DROPPED: Final = "stratoscope.events.dropped"
PREEMPTIONS: Final = "stratoscope.preemptions"
RECOMPUTED_TOKENS: Final = "stratoscope.recomputed_tokens"
LORA_NAME: Final = "stratoscope.lora.name"
LOGPROBS: Final = "stratoscope.request.logprobs"
PROMPT_LOGPROBS: Final = "stratoscope.request.prompt_logprobs"
REPETITION_PENALTY: Final = "stratoscope.request.repetition_penalty"
STRUCTURED_OUTPUT: Final = "stratoscope.request.structured_output"
PRIORITY: Final = "stratoscope.request.priority"

EVENT_COLUMNS: Final = ("step", "kind", "value")


class EventKind(IntEnum):
    """What a row of an engine request's event table says. Steps without a row, from the first to
    the last step and outside a preemption, are plain decode steps of that request."""

    PREFILL = 1  # value: prompt tokens of its own computed in this step
    RECOMPUTE = 2  # value: tokens computed again in this step, after a preemption
    PREEMPTED = 3  # value: computed tokens lost; it is out of the batch from this step on
    RESUMED = 4  # value: tokens found in the prefix cache; back in the batch from this step on
    SKIPPED = 5  # running, but not scheduled in this step; value: WaitReason
    BLOCKED = 6  # waiting for a reason of its own at this step's schedule; value: WaitReason


class WaitReason(IntEnum):
    """Why a request was not scheduled. NONE: nobody was waiting."""

    NONE = 0
    SLOTS = 1  # max_num_seqs running already
    TOKEN_BUDGET = 2  # max_num_batched_tokens used up
    KV_BLOCKS = 3  # not enough free KV blocks
    PREEMPTION = 4  # a preemption in this step: vLLM admits nobody in such a step
    KV_TRANSFER = 5  # remote KV not there yet
    ADAPTER = 6  # max_loras adapters in this batch already
    GRAMMAR = 7  # structured output grammar still compiling
    OTHER = 8
    PAUSED = 9  # the engine was paused


# --- request.worker ----------------------------------------------------------------------------------
# Also FIRST_STEP, LAST_STEP, RANK, ENGINE_UID.
EXEC_TOTAL: Final = "stratoscope.worker.exec_ns"  # rank busy between its first and last step

# --- windows -------------------------------------------------------------------------------------------
COLUMNS: Final = "stratoscope.columns"  # string array
ROWS: Final = "stratoscope.rows"  # bytes
WATERMARK: Final = "stratoscope.watermark_ns"  # all that ended before this time has been sent

STEP_COLUMNS: Final = (
    "step",
    "sched_start_ns",
    "sched_end_ns",
    "dispatch_end_ns",  # execute_model handed over to the workers (in one process: executed)
    "update_start_ns",  # model output is back, update_from_output called
    "update_end_ns",
    "input_start_ns",  # new requests taken from the input queue before this step
    "input_end_ns",
    "n_scheduled",  # requests in the step
    "n_prefill",  # of them, requests with prompt or recomputed tokens
    "prefill_tokens",
    "decode_tokens",
    "context_tokens",  # sum of the context lengths of decoding requests
    "n_running",
    "n_waiting",
    "kv_usage_ppm",
    "wait_reason",  # WaitReason of the head of the waiting queue after schedule()
    "n_preempted",
    "flags",  # StepFlag
)


class StepFlag(IntEnum):
    """Bits of a step's ``flags``."""

    BATCH_QUEUE = 1  # step_with_batch_queue: the next step may be scheduled before this one ends
    NO_OUTPUT = 2  # update_from_output was never seen for it (execution failed, or shutdown)


WORKER_STEP_COLUMNS: Final = (
    "step",
    "exec_start_ns",
    "exec_end_ns",
    "sample_start_ns",  # 0 where sampling is part of execute_model
    "sample_end_ns",
    "device_start_ns",  # CUDA events on the host clock; 0 without CUDA
    "device_end_ns",
)
OUTPUT_COLUMNS: Final = (
    "engine_ts_ns",  # EngineCoreOutputs.timestamp: lies inside a step's update interval
    "start_ns",  # process_outputs (detokenise, logprobs, hand-over) began
    "end_ns",
    "engine_index",
    "n_outputs",
)
OPEN_COLUMNS: Final = ("trace_id_hi", "trace_id_lo", "span_id", "arrival_ns")  # ids as int64 bits

# --- the hook's own account, cumulative for its process, on every window --------------------------------
HOOK_STEPS: Final = "stratoscope.hook.steps"
HOOK_REQUESTS: Final = "stratoscope.hook.requests"
HOOK_CRITICAL_NS: Final = "stratoscope.hook.critical_ns"  # on the engine's critical path
HOOK_OVERLAPPED_NS: Final = "stratoscope.hook.overlapped_ns"  # CPU time, while the workers execute
HOOK_REQUEST_NS: Final = "stratoscope.hook.request_ns"  # per-request work, any thread but the flush thread
HOOK_FLUSH_CPU_NS: Final = "stratoscope.hook.flush_cpu_ns"  # CPU time of the flush thread
HOOK_DROPPED: Final = "stratoscope.hook.dropped"  # records lost: full buffer or failed export
HOOK_ERRORS: Final = "stratoscope.hook.errors"  # exceptions inside the hook, all caught
HOOK_DISABLED: Final = "stratoscope.hook.disabled"  # hook points turned off after repeated errors
HOOK_MISSING: Final = "stratoscope.hook.missing_points"  # hook points this vLLM does not have
LOOP_LAG_MAX_NS: Final = "stratoscope.loop_lag.max_ns"  # event-loop lag in this window
LOOP_LAG_SUM_NS: Final = "stratoscope.loop_lag.sum_ns"

# --- spans that the agent adds under the request's trace id ----------------------------------------------
SYNTH: Final = "stratoscope.synthesised"  # true on every such span
CAUSE: Final = "stratoscope.cause"
SECONDS_PREFIX: Final = "stratoscope.seconds."  # + layer.cause, on the phase spans

# --- metrics: GPU evidence (NVML) -----------------------------------------------------------------
# OpenTelemetry's ``hw.*`` first. Every point carries HW_ID (the GPU's or MIG device's UUID).
HW_ID: Final = "hw.id"
HW_NAME: Final = "hw.name"  # gpu0, gpu1 ... in NVML's (PCI bus) order
HW_MODEL: Final = "hw.model"
HW_VENDOR: Final = "hw.vendor"
HW_PARENT: Final = "hw.parent"  # a MIG device's GPU
HW_TYPE: Final = "hw.type"
HW_STATE: Final = "hw.state"
HW_SENSOR_LOCATION: Final = "hw.sensor_location"
HW_GPU_TASK: Final = "hw.gpu.task"
IO_DIRECTION: Final = "network.io.direction"  # transmit | receive, as the GPU sees it
PROCESS_PID: Final = "process.pid"

M_GPU_UTILIZATION: Final = "hw.gpu.utilization"  # share of time in which any kernel ran
M_GPU_MEMORY_USAGE: Final = "hw.gpu.memory.usage"
M_GPU_MEMORY_LIMIT: Final = "hw.gpu.memory.limit"
M_GPU_IO: Final = "hw.gpu.io"
M_POWER: Final = "hw.power"
M_ENERGY: Final = "hw.energy"
M_TEMPERATURE: Final = "hw.temperature"
M_ERRORS: Final = "hw.errors"
M_STATUS: Final = "hw.status"

GPU_LINK: Final = "stratoscope.gpu.link"  # pcie | nvlink
GPU_CLOCK: Final = "stratoscope.gpu.clock"  # graphics | sm | memory
GPU_REASON: Final = "stratoscope.gpu.reason"  # why clocks are held down
M_GPU_MEMORY_BUSY: Final = "stratoscope.gpu.memory.busy"  # share of time in which memory was read or written
M_GPU_CLOCK: Final = "stratoscope.gpu.clock.speed"
M_GPU_CLOCK_LIMIT: Final = "stratoscope.gpu.clock.speed.limit"
M_GPU_CLOCKS_EVENT: Final = "stratoscope.gpu.clocks_event"  # 1 while GPU_REASON holds clocks down
M_GPU_THROTTLE_TIME: Final = "stratoscope.gpu.throttle.time"  # time in which GPU_REASON held clocks down
M_GPU_POWER_LIMIT: Final = "stratoscope.gpu.power.limit"
M_GPU_PCIE_GENERATION: Final = "stratoscope.gpu.pcie.link.generation"
M_GPU_PCIE_WIDTH: Final = "stratoscope.gpu.pcie.link.width"
M_GPU_PROCESSES: Final = "stratoscope.gpu.processes"
M_GPU_PROCESS_MEMORY: Final = "stratoscope.gpu.process.memory"
