"""A request in plain words: only what was measured, no cause that has no time in it."""

from __future__ import annotations

from typing import Any, Final

from stratoscope.attribution.taxonomy import CELL_INDEX, CELLS

_MIN_SHARE = 0.05  # smaller parts are summed up as the rest
_PHASE_NAMES: Final = {"ttft": "Time to first token", "decode": "After the first token"}
_WORDS: Final = {
    "framework.wait_slots": "waited for a slot (max_num_seqs requests were running)",
    "framework.wait_kv_blocks": "waited for free KV blocks",
    "framework.wait_token_budget": "waited because max_num_batched_tokens was used up",
    "framework.wait_step_boundary": "waited for the running step to end",
    "framework.wait_grammar": "waited for its grammar to compile",
    "framework.wait_adapter": "waited for a LoRA adapter slot",
    "framework.wait_kv_transfer": "waited for a KV transfer",
    "framework.core_input_queue": "waited in the engine core's input queue while a step ran",
    "framework.stream_wait": "had its output ready, but the API server's event loop was busy elsewhere",
    "framework.flush": "was written to the client (a slow reader, or the socket)",
    "framework.tokenize": "was tokenised",
    "framework.template": "rendered the chat template",
    "model.prefill": "its own prefill",
    "model.decode": "decode steps that it shared",
    "model.prefill_interference": "other requests' prompts in its steps",
    "model.preempted": "was out of the batch after a preemption",
    "model.recompute": "computed tokens again that a preemption threw away",
    "model.sampling": "sampling",
}


def explain(
    attributes: dict[str, Any], phases: dict[str, Any], neighbours: list[dict[str, Any]]
) -> list[str]:
    """Sentences about one request. ``phases`` and ``neighbours`` as in the request document."""
    sentences = [_headline(attributes, phases)]
    for phase, title in _PHASE_NAMES.items():
        total_s = phases[phase]["seconds"]
        if total_s > 0:
            sentences.append(f"{title} {_time(total_s)}: {_parts(phases[phase]['causes'], total_s)}.")
    if attributes.get("preemptions"):
        sentences.append(
            f"Preempted {_times(attributes['preemptions'])};"
            f" {attributes.get('recomputed_tokens', 0)} tokens were computed again."
        )
    if neighbours:
        first = neighbours[0]
        more = f" and {len(neighbours) - 1} other requests" if len(neighbours) > 1 else ""
        sentences.append(
            f"Prompts of request {first['trace_id']} ({first['tokens']} tokens in its steps,"
            f" {_time(first['seconds'])}){more} ran in its steps."
        )
    missing = [c for c in phases["e2e"]["causes"] if c["layer"] == "unattributed"]
    if missing:
        names = "; ".join(_meaning(c) for c in missing)
        lost_s = sum(c["seconds"] for c in missing)
        sentences.append(f"No evidence for {_time(lost_s)} ({sum(c['share'] for c in missing):.0%}): {names}")
    return sentences


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _headline(attributes: dict[str, Any], phases: dict[str, Any]) -> str:
    outcome = attributes.get("outcome", "unknown")
    tokens = f"{attributes.get('input_tokens', 0)} tokens in, {attributes.get('output_tokens', 0)} out"
    cached = attributes.get("cached_tokens")
    if cached:
        tokens += f", {cached} from the prefix cache"
    return f"{_time(phases['e2e']['seconds'])} in all, {outcome}, {tokens}."


def _parts(causes: list[dict[str, Any]], total_s: float) -> str:
    named = [c for c in causes if c["share"] >= _MIN_SHARE]
    words = [f"{_time(c['seconds'])} ({c['share']:.0%}) {_words(c)}" for c in named]
    rest_s = total_s - sum(c["seconds"] for c in named)
    if rest_s > 0 and len(named) < len(causes):
        words.append(f"{_time(rest_s)} in {len(causes) - len(named)} smaller parts")
    return "; ".join(words)


def _words(cause: dict[str, Any]) -> str:
    name = f"{cause['layer']}.{cause['cause']}"
    return _WORDS.get(name) or _meaning(cause).rstrip(".").lower()


def _meaning(cause: dict[str, Any]) -> str:
    return CELLS[CELL_INDEX[f"{cause['layer']}.{cause['cause']}"]].meaning


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.0f} us"
