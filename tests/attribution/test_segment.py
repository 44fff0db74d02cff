"""Cutting requests: every expected number was worked out by hand, in ms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from stratoscope.instrumentation.semconv import EventKind, Outcome, WaitReason

MS = 1_000_000
ADMISSION = {
    "arrival_ns": 1000, "body_ns": 1001, "template_start_ns": 1002, "template_end_ns": 1004,
    "tokenize_start_ns": 1005, "tokenize_end_ns": 1008, "submit_ns": 1010,
}  # fmt: skip
CORE = {"core_received_ns": 1012, "core_preprocessed_ns": 1013, "queued_ns": 1022, "arrival_step": 6}


@pytest.fixture
def chat(scene):
    """Three synchronous steps: it waits for a slot during 6, prefills in 7, decodes in 8."""
    scene.step(5, (990, 992), 993, (1018, 1020), [(995, 1014)], [(1015, 1016)], decode_tokens=9)
    scene.step(
        6, (1023, 1025), 1026, (1052, 1054), [(1028, 1048)], [(1049, 1050)],
        taken=(1021, 1022), decode_tokens=9, wait_reason=WaitReason.SLOTS,
    )  # fmt: skip
    scene.step(
        7,
        (1055, 1057),
        1058,
        (1096, 1100),
        [(1060, 1090)],
        [(1092, 1094)],
        prefill_tokens=60,
        decode_tokens=40,
    )
    scene.step(
        8,
        (1101, 1102),
        1103,
        (1128, 1129),
        [(1104, 1124)],
        [(1125, 1126)],
        prefill_tokens=50,
        decode_tokens=50,
    )
    scene.output(1099, 1103, 1105)
    scene.output(1129, 1131, 1132)
    return scene


@pytest.fixture
def own(engine):
    return engine(
        [(7, EventKind.PREFILL, 40)], first_step=7, first_output_step=7, last_step=8, finished_ns=1129, **CORE
    )


def test_streaming_request(chat, own, server, spent):
    request = server(
        [own], [(1106, 1107), (1134, 1136), (1138, 1140)], last_byte_ns=1140, end_ns=1141, **ADMISSION
    )
    result = chat.segment(request)
    assert (result.arrival_ns, result.first_token_ns, result.end_ns) == (1000 * MS, 1107 * MS, 1140 * MS)
    assert spent(result, "ttft") == {
        "receive": 1, "handler": 2, "template": 2, "tokenize": 3, "preprocess": 2,
        "ipc_request": 2, "core_preprocess": 1, "core_input_queue": 9,
        "wait_step_boundary": 3,  # queued 1022, scheduled without it 1025
        "wait_slots": 32,  # until 1057
        "dispatch": 3, "prefill": 12, "prefill_interference": 6, "batch_decode": 12,  # 40, 20, 40 tokens
        "result_ipc": 4, "sampling": 2, "update": 4,
        "ipc_response": 3, "output_processing": 2, "stream_wait": 1, "flush": 1,
    }  # fmt: skip
    assert spent(result, "decode") == {
        "prefill_interference": 7,  # of 10 from 1104 on; 1107 is where the first token's flush ended
        "decode": 10, "result_ipc": 3, "sampling": 1, "update": 1,
        "ipc_response": 2, "output_processing": 1, "stream_wait": 2, "flush": 4, "respond": 2,
    }  # fmt: skip
    assert spent(result, "itl") == {
        "prefill_interference": 7, "decode": 10, "result_ipc": 3, "sampling": 1, "update": 1,
        "ipc_response": 2, "output_processing": 1, "stream_wait": 2, "flush": 2,
    }  # fmt: skip
    engine_segments = result.engine >= 0
    assert set(result.step[engine_segments].tolist()) >= {6, 7, 8}
    assert (result.engine[engine_segments] == 0).all()


def test_role_delta_before_the_first_token_is_not_the_first_token(chat, own, server):
    request = server(
        [own], [(1030, 1031), (1106, 1107), (1134, 1136)], last_byte_ns=1136, end_ns=1136, **ADMISSION
    )
    assert chat.segment(request).first_token_ns == 1107 * MS


def test_request_that_is_not_streamed(chat, own, server, spent):
    request = server([own], [(1135, 1137)], False, last_byte_ns=1137, end_ns=1138, **ADMISSION)
    result = chat.segment(request)
    assert result.first_token_ns == 1105 * MS
    ttft = spent(result, "ttft")
    assert sum(ttft.values()) == 105
    assert "stream_wait" not in ttft
    assert "flush" not in ttft
    decode = spent(result, "decode")
    assert decode == {
        "prefill_interference": 9, "decode": 10, "result_ipc": 3, "sampling": 1, "update": 1,
        "ipc_response": 2, "output_processing": 1, "respond": 3, "flush": 2,
    }  # fmt: skip
    assert spent(result, "itl") == {}


def test_slow_reader(chat, own, server, spent):
    """The first flush blocks until 1150: decode is over by then, what is left is output path."""
    request = server([own], [(1106, 1150), (1151, 1160)], last_byte_ns=1160, end_ns=1160, **ADMISSION)
    result = chat.segment(request)
    assert spent(result, "ttft")["flush"] == 44
    assert spent(result, "decode") == {"stream_wait": 1, "flush": 9}


def test_back_pressure_of_an_earlier_flush_is_flush(chat, own, server, spent):
    chat.output(1055, 1056, 1056)  # of somebody else
    request = server(
        [own], [(1106, 1107), (1125, 1133), (1134, 1136)], last_byte_ns=1136, end_ns=1136, **ADMISSION
    )
    decode = spent(chat.segment(request), "decode")
    assert decode["flush"] == 3  # 1132..1133 of the earlier one, 1134..1136
    assert decode["stream_wait"] == 1


def test_asynchronous_scheduling(scene, engine, server, spent):
    """Step 1 prefills while step 0 still executes; step 2 starts before step 1's output is handled."""
    scene.step(0, (10, 11), 12, (31, 32), [(13, 30)], decode_tokens=4, flags=1)
    scene.step(1, (15, 16), 17, (54, 56), [(30, 50)], prefill_tokens=10, flags=1)
    scene.step(2, (33, 34), 35, (72, 73), [(51, 70)], decode_tokens=5, flags=1)
    scene.output(55, 57, 58)
    scene.output(73, 74, 75)
    own = engine(
        [(1, EventKind.PREFILL, 10)], first_step=1, first_output_step=1, last_step=2,
        core_received_ns=9, core_preprocessed_ns=9, queued_ns=10, arrival_step=1, finished_ns=73,
    )  # fmt: skip
    request = server([own], [(59, 60), (76, 77)], arrival_ns=8, submit_ns=9, last_byte_ns=77, end_ns=77)
    result = scene.segment(request)
    ttft = spent(result, "ttft")
    assert ttft == {
        "handler": 1, "core_input_queue": 1,
        "wait_step_boundary": 1,  # until 11, the first schedule() that ended after it was queued
        "wait_other": 5,  # step 0 left no reason
        "wait_pipeline": 14,  # 16..30: scheduled, and the workers execute step 0
        "prefill": 20,
        "result_ipc": 4,  # 50..54: step 2 executes from 51 on, but the first token does not wait for it
        "update": 2, "ipc_response": 1, "output_processing": 1, "stream_wait": 1, "flush": 1,
    }  # fmt: skip
    assert spent(result, "decode") == {
        "decode": 10, "result_ipc": 2, "update": 1,
        "ipc_response": 1, "output_processing": 1, "stream_wait": 1, "flush": 1,
    }  # fmt: skip


def test_preemption(scene, engine, server, spent):
    """Out at step 2, back at step 4 with 6 tokens to compute again in two chunks."""
    for number, prefill, decode, preempted in (
        (1, 4, 0, 0),
        (2, 0, 2, 1),
        (3, 0, 2, 0),
        (4, 4, 2, 0),
        (5, 2, 2, 0),
        (6, 0, 3, 0),
    ):
        start = 10 * number
        scene.step(
            number, (start, start + 1), start + 2, (start + 8, start + 9), [(start + 2, start + 8)],
            prefill_tokens=prefill, decode_tokens=decode, n_preempted=preempted,
        )  # fmt: skip
        scene.output(start + 9, start + 9, start + 9)
    own = engine(
        [
            (1, EventKind.PREFILL, 4), (2, EventKind.PREEMPTED, 4), (4, EventKind.RESUMED, 0),
            (4, EventKind.RECOMPUTE, 4), (5, EventKind.RECOMPUTE, 1), (5, EventKind.PREFILL, 1),
        ],
        first_step=1, first_output_step=1, last_step=6, queued_ns=10, arrival_step=1, finished_ns=69,
    )  # fmt: skip
    request = server(
        [own], [(19, 20), (59, 60), (69, 70)], arrival_ns=10, submit_ns=10, last_byte_ns=70, end_ns=70
    )
    result = scene.segment(request)
    assert spent(result, "ttft") == {
        "wait_step_boundary": 1, "dispatch": 1, "prefill": 6, "update": 1, "flush": 1,
    }  # fmt: skip
    assert spent(result, "decode") == {
        "schedule": 3,  # of steps 2, 5 and 6; before step 2's end it was still in the batch
        "preempted": 20,  # 21..41
        "dispatch": 3,
        "recompute": 4 + 1.5, "batch_decode": 2 + 3, "prefill": 1.5,  # steps 4 and 5, 6 ms each
        "decode": 6, "update": 3, "host_gap": 2, "flush": 1,
    }  # fmt: skip
    itl = spent(result, "itl")
    assert sum(itl.values()) == 50
    assert itl["preempted"] == 20


def test_execution_in_which_it_took_part_stays_its_own_after_a_preemption(scene, engine, server, spent):
    """Asynchronous: step 1 still executes when the schedule() of step 2 throws the request out."""
    scene.step(1, (10, 11), 12, (30, 31), [(13, 29)], prefill_tokens=4, flags=1)
    scene.step(2, (15, 16), 17, (50, 51), [(32, 48)], decode_tokens=1, flags=1)
    own = engine(
        [(1, EventKind.PREFILL, 4), (2, EventKind.PREEMPTED, 4)],
        first_step=1, first_output_step=-1, last_step=1, queued_ns=10, arrival_step=1, finished_ns=45,
    )  # fmt: skip
    request = server([own], arrival_ns=10, submit_ns=10, end_ns=45, outcome=Outcome.ABORTED)
    assert spent(scene.segment(request), "e2e") == {
        "wait_step_boundary": 1, "dispatch": 2, "prefill": 16, "preempted": 16,
    }  # fmt: skip


def test_skipped_steps_keep_their_reason(chat, own, server, spent):
    skipped = replace(
        own, events=np.append(own.events, [[8, EventKind.SKIPPED, WaitReason.TOKEN_BUDGET]], axis=0)
    )
    chat.step(9, (1130, 1131), 1132, (1140, 1141), [(1133, 1139)], decode_tokens=2)
    chat.output(1141, 1142, 1143)
    request = server(
        [replace(skipped, last_step=9)],
        [(1106, 1107), (1144, 1145)],
        last_byte_ns=1145,
        end_ns=1145,
        **ADMISSION,
    )
    result = chat.segment(request)
    decode = spent(result, "decode")
    assert decode["skipped"] == 17 + 1  # execution from 1107 on, and sampling
    assert decode["decode"] == 6
    assert set(result.reason[result.step == 8].tolist()) == {0, int(WaitReason.TOKEN_BUDGET)}


def test_wait_reasons(scene, engine, server, spent):
    reasons = [
        WaitReason.TOKEN_BUDGET,
        WaitReason.KV_BLOCKS,
        WaitReason.PREEMPTION,
        WaitReason.NONE,
        WaitReason.SLOTS,
        77,
    ]
    for number, reason in enumerate([*reasons, WaitReason.NONE]):
        start = 10 + 10 * number
        scene.step(
            number,
            (start, start + 1),
            start + 2,
            (start + 8, start + 9),
            [(start + 3, start + 8)],
            wait_reason=reason,
        )
    own = engine(
        [(4, EventKind.BLOCKED, WaitReason.GRAMMAR)], first_step=6, first_output_step=-1, last_step=6,
        queued_ns=10, arrival_step=0, finished_ns=71,
    )  # fmt: skip
    request = server([own], arrival_ns=10, submit_ns=10, end_ns=71, outcome=Outcome.ABORTED)
    assert spent(scene.segment(request), "e2e") == {
        "wait_step_boundary": 1, "wait_token_budget": 10, "wait_kv_blocks": 20,
        "wait_other": 10, "wait_grammar": 20,  # the block outlasts what the head of the queue waits for
    }  # fmt: skip


def test_block_that_ends_gives_way_to_the_head_of_the_queue(scene, engine, server, spent):
    for number in range(4):
        start = 10 + 10 * number
        scene.step(
            number, (start, start + 1), start + 2, (start + 8, start + 9), wait_reason=WaitReason.SLOTS
        )
    own = engine(
        [(0, EventKind.BLOCKED, WaitReason.KV_TRANSFER), (2, EventKind.BLOCKED, WaitReason.NONE)],
        first_step=3, last_step=3, queued_ns=10, arrival_step=0, finished_ns=41,
    )  # fmt: skip
    request = server([own], arrival_ns=10, submit_ns=10, end_ns=41, outcome=Outcome.ABORTED)
    assert spent(scene.segment(request), "e2e") == {
        "wait_step_boundary": 1, "wait_kv_transfer": 20, "wait_slots": 10,
    }  # fmt: skip


def test_two_choices(chat, own, engine, server, spent):
    """n=2: the second choice gets its slot only after the first has finished."""
    chat.step(
        9, (1130, 1131), 1132, (1150, 1151), [(1133, 1148)], prefill_tokens=15, wait_reason=WaitReason.NONE
    )
    chat.output(1151, 1153, 1154)
    second = engine(
        [(9, EventKind.PREFILL, 15)], first_step=9, first_output_step=9, last_step=9, finished_ns=1151,
        core_received_ns=1012, core_preprocessed_ns=1014, queued_ns=1022, arrival_step=6,
    )  # fmt: skip
    request = server(
        [second, own], [(1106, 1107), (1134, 1136), (1155, 1156)], last_byte_ns=1156, end_ns=1156, **ADMISSION
    )
    result = chat.segment(request)
    assert result.first_token_ns == 1107 * MS
    assert spent(result, "ttft")["prefill"] == 12
    assert spent(result, "decode") == {
        "wait_other": 24,  # 1107..1131: steps 7 and 8 left no reason
        "dispatch": 2, "prefill": 15, "result_ipc": 2, "update": 1,
        "ipc_response": 2, "output_processing": 1, "stream_wait": 1, "flush": 1,
    }  # fmt: skip
    itl = spent(result, "itl")
    assert sum(itl.values()) == 49
    assert itl["decode"] == 10  # the first gap belongs to the first choice
    assert set(result.engine.tolist()) == {-1, 0, 1}


def test_engine_requests_one_after_another(chat, own, engine, server, spent):
    """A tool loop: the second engine request is submitted when the first is done."""
    chat.step(9, (1141, 1142), 1143, (1160, 1161), [(1144, 1158)], prefill_tokens=14)
    chat.output(1161, 1163, 1164)
    second = engine(
        [(9, EventKind.PREFILL, 14)], first_step=9, first_output_step=9, last_step=9, finished_ns=1161,
        core_received_ns=1138, core_preprocessed_ns=1139, queued_ns=1140, arrival_step=9,
    )  # fmt: skip
    request = server([own, second], [(1165, 1166)], False, last_byte_ns=1166, end_ns=1166, **ADMISSION)
    decode = spent(chat.segment(request), "decode")
    assert decode["handler"] == 9  # 1129..1138: the server works on the first one's answer
    assert decode["decode"] == 10
    assert decode["prefill"] == 14
    assert (decode["core_preprocess"], decode["core_input_queue"]) == (1, 1)


def test_abort_while_decoding(chat, own, server, spent):
    aborted = replace(own, finished_ns=1117 * MS)
    request = server([aborted], [(1106, 1107)], end_ns=1120, outcome=Outcome.ABORTED, **ADMISSION)
    result = chat.segment(request)
    assert result.end_ns == 1120 * MS
    assert spent(result, "decode") == {"prefill_interference": 7, "decode": 3, "respond": 3}


def test_abort_after_its_last_step(chat, own, server, spent):
    aborted = replace(own, last_step=7, finished_ns=1115 * MS)
    request = server([aborted], [(1106, 1107)], end_ns=1120, outcome=Outcome.ABORTED, **ADMISSION)
    assert spent(chat.segment(request), "decode") == {
        "result_ipc": 8,  # 1107..1115: step 8, which it is not in, is with the workers
        "respond": 5,
    }  # fmt: skip


def test_abort_while_waiting(chat, engine, server, spent):
    waiting = engine(first_step=-1, last_step=-1, finished_ns=1045, **CORE)
    request = server([waiting], end_ns=1040, outcome=Outcome.ABORTED, **ADMISSION)
    result = chat.segment(request)
    assert spent(result, "e2e")["wait_slots"] == 15  # 1025..1040
    assert spent(result, "decode") == {}
    assert result.first_token_ns == result.end_ns


def test_rejected_request(chat, server, spent):
    request = server(
        [], [(1005, 1006)], False, arrival_ns=1000, body_ns=1002, last_byte_ns=1007, end_ns=1009,
        outcome=Outcome.ERROR,
    )  # fmt: skip
    assert spent(chat.segment(request), "ttft") == {"receive": 2, "handler": 3, "flush": 1, "respond": 3}


def test_offline_request(chat, own, server, spent):
    request = server(
        [own], [], False, api="llm", arrival_ns=1010, submit_ns=1010, last_byte_ns=1132, end_ns=1132
    )
    result = chat.segment(request)
    assert result.first_token_ns == 1105 * MS
    assert spent(result, "decode")["output_processing"] == 1
    assert "respond" not in spent(result, "decode")


def test_stop_string_ends_the_response_before_the_engine(chat, own, server, spent):
    """The server found a stop string in step 8's text and sent its last byte; the core ran on."""
    chat.step(9, (1130, 1131), 1132, (1150, 1151), [(1133, 1148)], decode_tokens=2)
    request = server(
        [replace(own, last_step=9, finished_ns=1151 * MS)], [(1106, 1107), (1134, 1136)],
        last_byte_ns=1136, end_ns=1136, **ADMISSION,
    )  # fmt: skip
    decode = spent(chat.segment(request), "decode")
    assert decode == {
        "prefill_interference": 7, "decode": 10, "result_ipc": 3, "sampling": 1, "update": 1,
        "ipc_response": 2, "output_processing": 1, "stream_wait": 2, "flush": 2,
    }  # fmt: skip


# --- records that are missing or wrong --------------------------------------------------------------


def test_engine_record_missing(chat, server, spent):
    request = server(
        [], [(1106, 1107), (1134, 1136)], n_engine_requests=1, last_byte_ns=1136, end_ns=1136, **ADMISSION
    )
    e2e = spent(chat.segment(request), "e2e")
    assert e2e["engine_record_missing"] == 96 + 27  # submit..first flush, and between the flushes
    assert e2e["flush"] == 3


def test_engine_of_unknown_steps(chat, own, server, spent):
    request = server(
        [replace(own, engine_uid="other")],
        [(1106, 1107), (1134, 1136)],
        last_byte_ns=1136,
        end_ns=1136,
        **ADMISSION,
    )
    e2e = spent(chat.segment(request), "e2e")
    assert sum(e2e.values()) == 136
    assert e2e["steps_missing"] == 84  # queued 1022 to the first flush 1106


def test_outputs_missing(chat, own, server, spent):
    chat.rows.clear()
    request = server([own], [(1106, 1107), (1134, 1136)], last_byte_ns=1136, end_ns=1136, **ADMISSION)
    result = chat.segment(request)
    assert spent(result, "ttft")["outputs_missing"] == 6  # ready 1100, flush 1106
    assert spent(result, "decode")["outputs_missing"] == 5  # ready 1129, flush 1134
    assert spent(result, "itl")["outputs_missing"] == 5


def test_outputs_of_another_engine_do_not_count(chat, own, server, spent):
    for row in chat.rows:
        row["engine_index"] = 1
    chat.output(500, 501, 502, index=2)
    request = server([own], [(1106, 1107), (1134, 1136)], last_byte_ns=1136, end_ns=1136, **ADMISSION)
    assert spent(chat.segment(request), "ttft")["outputs_missing"] == 6


def test_lost_step_row_of_the_first_output(chat, own, server, spent):
    chat.steps = [row for row in chat.steps if row["step"] != 7]
    request = server([own], [(1106, 1107), (1134, 1136)], last_byte_ns=1136, end_ns=1136, **ADMISSION)
    ttft = spent(chat.segment(request), "ttft")
    assert ttft["steps_missing"] == 52  # 1054, the end of step 6, to the flush at 1106
    assert ttft["wait_slots"] + ttft["wait_step_boundary"] + ttft["steps_missing"] == 84


def test_lost_step_row_while_decoding(chat, own, server, spent):
    chat.step(9, (1150, 1151), 1152, (1160, 1161), [(1153, 1159)], decode_tokens=2)
    chat.step(8, (0, 0), 0, (0, 0))
    chat.steps = [row for row in chat.steps if row["step"] != 8]
    chat.output(1161, 1162, 1163)
    request = server(
        [replace(own, last_step=9)], [(1106, 1107), (1164, 1165)], last_byte_ns=1165, end_ns=1165, **ADMISSION
    )
    decode = spent(chat.segment(request), "decode")
    assert decode["steps_missing"] == 43  # 1107 to the schedule() of step 9
    assert decode["decode"] == 6


def test_contradiction_of_more_than_a_millisecond_is_a_clock_problem(chat, own, server, spent):
    late = {**ADMISSION, "submit_ns": 1016}  # after the core received it at 1012
    request = server([own], [(1106, 1107), (1134, 1136)], last_byte_ns=1136, end_ns=1136, **late)
    ttft = spent(chat.segment(request), "ttft")
    assert ttft["clock"] == 4
    assert ttft["preprocess"] == 4  # tokenized 1008, contradicted from 1012 on
    assert sum(ttft.values()) == 107


def test_contradiction_of_less_is_clamped(chat, own, server, spent):
    near = {**ADMISSION, "submit_ns": 1013}
    request = server(
        [replace(own, core_preprocessed_ns=1014 * MS)], [(1106, 1107), (1134, 1136)],
        last_byte_ns=1136, end_ns=1136, **near,
    )  # fmt: skip
    ttft = spent(chat.segment(request), "ttft")
    assert "clock" not in ttft
    assert ttft["core_preprocess"] == 1


def test_missing_optional_times_fall_to_their_neighbours(chat, own, server, spent):
    few = {"arrival_ns": 1000, "body_ns": 1001, "submit_ns": 1010}
    request = server([own], [(1106, 1107), (1134, 1136)], last_byte_ns=1136, end_ns=1136, **few)
    ttft = spent(chat.segment(request), "ttft")
    assert (ttft["receive"], ttft["handler"]) == (1, 9)
    assert not {"template", "tokenize", "preprocess"} & set(ttft)


def test_part_of_the_choices_unrecorded(chat, own, server, spent):
    request = server(
        [own], [(1106, 1107), (1134, 1136)], n_engine_requests=2, last_byte_ns=1136, end_ns=1136, **ADMISSION
    )
    decode = spent(chat.segment(request), "decode")
    assert decode["engine_record_missing"] == 2  # in place of stream_wait
