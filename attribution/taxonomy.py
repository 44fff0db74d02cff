"""The causes that a nanosecond of latency can be charged to, and the labels that go with each.

One table, :data:`CELLS`, serves the code, the documentation (``docs/causes.md`` is generated from
it) and the exporters. A cell is charged to one cause, named ``layer.cause``; it also carries one
label for each of the three layers, so that every layer's column of labels sums to the whole
latency. A label that no evidence supports is ``unknown``, never a guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LAYERS: Final = ("model", "framework", "infrastructure", "unattributed")
PHASES: Final = ("ttft", "decode", "e2e", "itl")
UNKNOWN: Final = "unknown"


@dataclass(frozen=True, slots=True)
class Cell:
    """One cause: ``layer`` and ``cause`` name what is charged, the labels say what each layer did.

    ``meaning`` and ``evidence`` are sentences for people; ``evidence`` names the recorded times
    that must be present for the cell to be used.
    """

    layer: str
    cause: str
    model: str
    framework: str
    infrastructure: str
    meaning: str
    evidence: str

    @property
    def name(self) -> str:
        """``layer.cause``, the name used in JSON, metrics and spans."""
        return f"{self.layer}.{self.cause}"


def _framework(cause: str, meaning: str, evidence: str, model: str = "idle") -> Cell:
    return Cell("framework", cause, model, cause, UNKNOWN, meaning, evidence)


def _model(cause: str, meaning: str, evidence: str, framework: str = "execute") -> Cell:
    return Cell("model", cause, cause, framework, UNKNOWN, meaning, evidence)


def _unattributed(cause: str, meaning: str, evidence: str) -> Cell:
    return Cell("unattributed", cause, UNKNOWN, UNKNOWN, UNKNOWN, meaning, evidence)


CELLS: Final[tuple[Cell, ...]] = (
    _framework("receive", "Reading the request body from the socket.", "arrival, body"),
    _framework(
        "handler",
        "Routing, JSON and parameter validation, and other API server code before the engine has the request.",
        "body, submit",
    ),
    _framework("template", "Rendering the chat template.", "template start and end"),
    _framework(
        "tokenize",
        "Tokenising the prompt, with the wait for the tokenizer's thread.",
        "tokenize start and end",
    ),
    _framework("preprocess", "Turning tokens and parameters into an engine request.", "tokenize end, submit"),
    _framework(
        "ipc_request", "Serialising the request and carrying it to the engine core.", "submit, core received"
    ),
    _framework(
        "core_preprocess",
        "Block hashes, multi-modal and grammar set-up in the core's input thread.",
        "core received and preprocessed",
    ),
    _framework(
        "core_input_queue",
        "In the core's input queue while the engine loop is inside a step.",
        "core preprocessed, queued",
    ),
    _framework(
        "wait_step_boundary",
        "Queued while a step runs, before the scheduler first looks at it.",
        "queued, schedule end",
    ),
    _framework("wait_slots", "Waiting: max_num_seqs requests are running.", "wait reason of each schedule"),
    _framework(
        "wait_token_budget",
        "Waiting: max_num_batched_tokens is used up in each step.",
        "wait reason of each schedule",
    ),
    _framework("wait_kv_blocks", "Waiting: too few free KV blocks.", "wait reason of each schedule"),
    _framework(
        "wait_kv_transfer",
        "Waiting for KV blocks from another engine or tier.",
        "wait reason of each schedule",
    ),
    _framework(
        "wait_adapter", "Waiting: max_loras adapters are in the batch.", "wait reason of each schedule"
    ),
    _framework(
        "wait_grammar", "Waiting for a structured output grammar to compile.", "wait reason of each schedule"
    ),
    _framework("wait_paused", "Waiting: the engine is paused.", "wait reason of each schedule"),
    _framework(
        "wait_other", "Waiting for a reason that the scheduler does not show.", "wait reason of each schedule"
    ),
    _framework(
        "wait_pipeline",
        "Scheduled, while the workers still execute an earlier step that it is not in.",
        "schedule end, execution of earlier steps",
    ),
    _framework("skipped", "In the running batch, but this step ran without it.", "skip event of the step"),
    _model(
        "prefill",
        "Its share, by tokens, of executing steps with its own prompt tokens.",
        "execution interval, own tokens",
    ),
    _model(
        "decode",
        "Executing decode steps that it is in (other requests' prompt tokens taken out).",
        "execution interval",
    ),
    _model(
        "prefill_interference",
        "Other requests' prompt tokens in its steps, by their share of the step's tokens.",
        "execution interval, step tokens",
    ),
    _model(
        "batch_decode",
        "Other requests' decode tokens in its own prefill steps, by token share.",
        "execution interval, step tokens",
    ),
    _model(
        "recompute",
        "Computing tokens again that a preemption threw away.",
        "execution interval, recompute event",
    ),
    _model(
        "sampling",
        "Sampling, logits processing and the wait for the device where sampling is a call of its own.",
        "sample interval",
        "sample",
    ),
    _model(
        "preempted",
        "Out of the batch after a preemption, until it is scheduled again.",
        "preempted and resumed events",
        "wait_kv_blocks",
    ),
    _framework(
        "input_processing",
        "The engine loop takes new requests and aborts between steps.",
        "input start and end",
        "stalled",
    ),
    _framework("schedule", "scheduler.schedule().", "schedule start and end", "stalled"),
    _framework(
        "dispatch",
        "Handing the step to the workers, until the first rank starts on it.",
        "schedule end, execution start",
        "stalled",
    ),
    _framework(
        "result_ipc",
        "From the end of the last rank's work until the core handles the output.",
        "execution end, update start",
        "stalled",
    ),
    _framework("update", "scheduler.update_from_output().", "update start and end", "stalled"),
    _framework(
        "host_gap",
        "Between two steps: the engine loop does none of the recorded things.",
        "update end, next schedule start",
        "stalled",
    ),
    _framework(
        "ipc_response",
        "From the step's output until the API server begins to process it.",
        "update end, output processing start",
        "done",
    ),
    _framework(
        "output_processing",
        "Detokenising, logprobs and hand-over of the batch's outputs.",
        "output processing start and end",
        "done",
    ),
    _framework(
        "stream_wait",
        "Output is ready, but the API server's event loop has not written it yet.",
        "output processing end, flush start",
        "done",
    ),
    _framework(
        "flush",
        "Inside the response's send: serialising, socket, a slow reader's back-pressure.",
        "flush start and end",
        "done",
    ),
    _framework(
        "respond",
        "Building a response that is not streamed, or an error response.",
        "output processing end, flush start",
        "done",
    ),
    _unattributed("engine_record_missing", "The engine core's record of the request never arrived.", "-"),
    _unattributed("steps_missing", "The step table has no rows for this stretch.", "-"),
    _unattributed(
        "workers_missing", "The core waited for the workers, and no worker recorded the step.", "-"
    ),
    _unattributed("outputs_missing", "The API server's output table has no row for this output.", "-"),
    _unattributed("clock", "Recorded times contradict each other by more than a millisecond.", "-"),
)

CELL_NAMES: Final = tuple(cell.name for cell in CELLS)
CELL_INDEX: Final = {name: index for index, name in enumerate(CELL_NAMES)}
N_CELLS: Final = len(CELLS)
