"""The demonstration's situations: a mix of requests and the server that makes it interesting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from stratoscope.demo.server import ServerOptions
from stratoscope.demo.workload import Kind, Mix


@dataclass(frozen=True)
class Scenario:
    """``expect`` says in words what the matrix should show."""

    name: str
    title: str
    expect: str
    mix: Mix
    server: ServerOptions
    requests: int = 240
    concurrency: int = 64


_MIXED: Final = {
    Kind.CHAT: 0.50,
    Kind.LONG_PROMPT: 0.10,
    Kind.CHOICES: 0.08,
    Kind.COMPLETION: 0.14,
    Kind.SAMPLING: 0.08,
    Kind.ABORT: 0.10,
}

SCENARIOS: Final[Mapping[str, Scenario]] = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "mixed",
            "Short chats, long prompts, n = 4, completions, costly sampling and clients that leave",
            "more clients than slots: waiting for a slot first, then decoding and other requests' prompts",
            Mix(_MIXED),
            ServerOptions(max_num_seqs=32),
        ),
        Scenario(
            "kv-starved",
            "The same load with a KV cache too small for it",
            "waiting for KV blocks, preemptions, and the same tokens computed again",
            Mix(_MIXED, chat_tokens=(64, 192), long_words=(400, 700)),
            ServerOptions(max_num_seqs=32, kv_blocks=28, prefix_caching=False, max_model_len=1536),
        ),
        Scenario(
            "interference",
            "Steady short chats, disturbed by long prompts",
            "chats whose tokens stall while somebody else's prompt is computed",
            Mix(
                {Kind.CHAT: 0.85, Kind.LONG_PROMPT: 0.15},
                chat_tokens=(64, 128),
                long_words=(900, 1200),
                long_tokens=(4, 8),
            ),
            ServerOptions(max_num_seqs=32, max_num_batched_tokens=2048, prefix_caching=False),
            concurrency=24,
        ),
    )
}
