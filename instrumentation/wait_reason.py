"""Why the head of vLLM's waiting queue was not scheduled.

Worked out by the order in which vLLM's scheduler checks, after the fact, from its own state: no
wrapper runs inside its loop. The last case (KV blocks) is checked against the free block count.
"""

from __future__ import annotations

from typing import Any

from .core_request import BLOCKED_STATUS
from .semconv import WaitReason


def head_wait_reason(scheduler: Any, output: Any, n_preempted: int) -> WaitReason:
    """Reason for the head of the queue, given the step's SchedulerOutput and its preemptions."""
    if n_preempted:
        return WaitReason.PREEMPTION
    pause = getattr(scheduler, "_pause_state", None)
    if pause is not None and getattr(pause, "name", "UNPAUSED") != "UNPAUSED":
        return WaitReason.PAUSED
    total = output.total_num_scheduled_tokens
    limit = getattr(scheduler, "max_num_active_reqs", None) or scheduler.max_num_running_reqs
    streaming = getattr(scheduler, "num_waiting_for_streaming_input", 0)
    if len(scheduler.running) + streaming >= limit:
        return WaitReason.SLOTS
    budget = scheduler.max_num_scheduled_tokens
    if total >= budget:
        return WaitReason.TOKEN_BUDGET
    queue = scheduler.waiting
    if not queue:
        return WaitReason.KV_TRANSFER  # only requests that hold blocks for a transfer are left
    head = queue.peek_request()
    own = BLOCKED_STATUS.get(getattr(head.status, "name", ""), 0)
    if own:
        return WaitReason(own)
    if _adapter_blocked(scheduler, head):
        return WaitReason.ADAPTER
    tokens = head.num_tokens - head.num_computed_tokens
    if not scheduler.scheduler_config.enable_chunked_prefill and tokens > budget - total:
        return WaitReason.TOKEN_BUDGET
    return WaitReason.KV_BLOCKS if _short_of_blocks(scheduler, head) else WaitReason.OTHER


def _adapter_blocked(scheduler: Any, head: Any) -> bool:
    config, lora = getattr(scheduler, "lora_config", None), getattr(head, "lora_request", None)
    if not config or lora is None:
        return False
    in_batch = {
        request.lora_request.lora_int_id for request in scheduler.running if request.lora_request is not None
    }
    return len(in_batch) >= config.max_loras and lora.lora_int_id not in in_batch


def _short_of_blocks(scheduler: Any, head: Any) -> bool:
    """True if the free blocks cannot hold the head's next chunk (or, where vLLM wants the whole
    sequence to fit, all of it) above the watermark that vLLM keeps free while others run."""
    manager = scheduler.kv_cache_manager
    pool = getattr(manager, "block_pool", None)
    if pool is None:
        return False
    tokens = head.num_tokens - head.num_computed_tokens
    if not getattr(scheduler, "scheduler_reserve_full_isl", False):
        tokens = min(tokens, scheduler.max_num_scheduled_tokens)
    block_size = max(int(getattr(scheduler, "block_size", 0) or 0), 1)
    needed = -(-tokens // block_size)
    if scheduler.running:
        needed += int(getattr(manager, "watermark_blocks", 0) or 0)
    return bool(needed > pool.get_num_free_blocks())
