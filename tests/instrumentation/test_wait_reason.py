"""Why the head of the queue waits, from a scheduler in each of its states (plain stand-ins for vLLM's)."""

from __future__ import annotations

from types import SimpleNamespace as Namespace
from typing import Any

import pytest

from stratoscope.instrumentation.semconv import WaitReason
from stratoscope.instrumentation.wait_reason import head_wait_reason


class Queue(list[Any]):
    def peek_request(self) -> Any:
        return self[0]


def lora(number: int) -> Any:
    return Namespace(lora_request=Namespace(lora_int_id=number))


def scheduler(head: dict[str, Any] | None = None, free_blocks: int = 100, **changes: Any) -> Any:
    request = {
        "status": Namespace(name="WAITING"),
        "lora_request": None,
        "num_tokens": 160,
        "num_computed_tokens": 0,
    } | (head or {})
    state: dict[str, Any] = {
        "running": [],
        "waiting": Queue([Namespace(**request)]),
        "max_num_running_reqs": 8,
        "max_num_scheduled_tokens": 64,
        "block_size": 16,
        "scheduler_config": Namespace(enable_chunked_prefill=True),
        "kv_cache_manager": Namespace(block_pool=Namespace(get_num_free_blocks=lambda: free_blocks)),
    }
    return Namespace(**(state | changes))


def reason(made: Any, scheduled_tokens: int = 10, n_preempted: int = 0) -> WaitReason:
    return head_wait_reason(made, Namespace(total_num_scheduled_tokens=scheduled_tokens), n_preempted)


PAUSED = Namespace(name="PAUSED_NEW")
UNPAUSED = Namespace(name="UNPAUSED")


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (scheduler(), WaitReason.OTHER),
        (scheduler(_pause_state=PAUSED), WaitReason.PAUSED),
        (scheduler(_pause_state=UNPAUSED), WaitReason.OTHER),
        (scheduler(running=[lora(1)] * 8), WaitReason.SLOTS),
        (scheduler(running=[lora(1)] * 7), WaitReason.OTHER),
        (scheduler(running=[lora(1)] * 7, num_waiting_for_streaming_input=1), WaitReason.SLOTS),
        (scheduler(waiting=Queue()), WaitReason.KV_TRANSFER),
        (scheduler({"status": Namespace(name="WAITING_FOR_REMOTE_KVS")}), WaitReason.KV_TRANSFER),
        (
            scheduler({"status": Namespace(name="WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR")}),
            WaitReason.GRAMMAR,
        ),
        (scheduler({"status": Namespace(name="WAITING_FOR_FSM")}), WaitReason.GRAMMAR),
    ],
)
def test_the_state_of_the_scheduler_gives_the_reason(made: Any, expected: WaitReason) -> None:
    assert reason(made) == expected


def test_preempting_comes_before_all_else() -> None:
    assert reason(scheduler(_pause_state=PAUSED), n_preempted=1) == WaitReason.PREEMPTION


def test_a_used_up_budget() -> None:
    assert reason(scheduler(), scheduled_tokens=64) == WaitReason.TOKEN_BUDGET
    assert reason(scheduler(), scheduled_tokens=63) == WaitReason.OTHER


def test_a_prompt_in_one_piece_needs_room_in_the_budget() -> None:
    whole = Namespace(enable_chunked_prefill=False)
    assert reason(scheduler({"num_tokens": 55}, scheduler_config=whole)) == WaitReason.TOKEN_BUDGET
    assert reason(scheduler({"num_tokens": 54}, scheduler_config=whole)) == WaitReason.OTHER
    cached = {"num_tokens": 55, "num_computed_tokens": 1}
    assert reason(scheduler(cached, scheduler_config=whole)) == WaitReason.OTHER


@pytest.mark.parametrize(
    ("running", "expected"),
    [([1, 2], WaitReason.ADAPTER), ([1, 3], WaitReason.OTHER), ([1], WaitReason.OTHER)],
)
def test_an_adapter_waits_for_a_place(running: list[int], expected: WaitReason) -> None:
    made = scheduler(
        vars(lora(3)), running=[lora(number) for number in running], lora_config=Namespace(max_loras=2)
    )
    assert reason(made) == expected


def test_an_adapter_takes_no_place_without_lora() -> None:
    assert reason(scheduler(vars(lora(3)), running=[lora(1), lora(2)], lora_config=None)) == WaitReason.OTHER


def test_blocks_for_the_next_chunk() -> None:
    assert reason(scheduler(free_blocks=3)) == WaitReason.KV_BLOCKS  # 64 tokens are 4 blocks
    assert reason(scheduler(free_blocks=4)) == WaitReason.OTHER


def test_blocks_for_all_of_it_where_vllm_wants_it_to_fit() -> None:
    assert reason(scheduler(free_blocks=9, scheduler_reserve_full_isl=True)) == WaitReason.KV_BLOCKS
    assert reason(scheduler(free_blocks=10, scheduler_reserve_full_isl=True)) == WaitReason.OTHER


def test_blocks_kept_free_while_others_run() -> None:
    pool = Namespace(get_num_free_blocks=lambda: 5)
    manager = Namespace(block_pool=pool, watermark_blocks=2)
    assert reason(scheduler(kv_cache_manager=manager)) == WaitReason.OTHER
    assert reason(scheduler(kv_cache_manager=manager, running=[lora(1)])) == WaitReason.KV_BLOCKS
