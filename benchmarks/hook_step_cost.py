"""What the hook adds to an engine step: ABBA blocks in one process, and the hook's own clock.

A real vLLM engine core runs in this process (``LLM`` with multiprocessing off), its worker beside
it (``--executor uni``, everything on one thread, so nothing hides) or in a process of its own
(``--executor mp``, as a server does). Blocks with the hook's step wrappers in place (A) and taken
out (B) alternate as ABBA; each block decodes one full batch. Compared is the CPU time of the
engine thread per step (``thread_time_ns``) less that of the model itself, which varies by more than
the hook costs, as the median of paired differences with its interquartile range; the drift guard is
the difference between the two B halves of the quartets. With ``mp`` the engine thread spins while
the worker executes, so only the own clock means anything there.

    python benchmarks/hook_step_cost.py MODEL_DIR --batch 256 --quartets 8
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine

_POINTS = ("schedule", "update_from_output", "finish_requests", "_preempt_request")


class Toggle:
    """Takes the step wrappers out of the engine's instances and puts them back."""

    def __init__(self, core: Any, recorder: Any) -> None:
        self.recorder = recorder
        self.wrapped = [(core.scheduler, name, vars(core.scheduler)[name]) for name in _POINTS]
        self.wrapped.append(
            (core.model_executor, "execute_model", vars(core.model_executor)["execute_model"])
        )
        worker = getattr(getattr(core.model_executor, "driver_worker", None), "worker", None)
        for name in ("execute_model", "sample_tokens"):
            if worker is not None:
                self.wrapped.append((worker, name, vars(worker)[name]))

    def set(self, on: bool) -> None:
        for owner, name, wrapper in self.wrapped:
            if on:
                setattr(owner, name, wrapper)
            else:
                vars(owner).pop(name, None)
        self.recorder.requests.clear()
        self.recorder.members.clear()
        self.recorder.prefilling.clear()
        self.recorder.ended.clear()


class ModelTime:
    """CPU time of the model's own work, measured below the hook's wrappers."""

    def __init__(self, core: Any) -> None:
        self.total_ns = 0
        runner = getattr(
            getattr(getattr(core.model_executor, "driver_worker", None), "worker", None), "model_runner", None
        )
        for name in ("execute_model", "sample_tokens") if runner is not None else ():
            setattr(runner, name, self._timed(getattr(runner, name)))

    def _timed(self, original: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            before = time.thread_time_ns()
            try:
                return original(*args, **kwargs)
            finally:
                self.total_ns += time.thread_time_ns() - before

        return timed


def block(engine: Any, core: Any, model: ModelTime, batch: int, tokens: int, tag: str) -> float:
    """Decode one batch to its end; median host CPU ns a step of the full-batch decode steps."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
    for index in range(batch):
        engine.add_request(f"{tag}-{index}", {"prompt_token_ids": [5, 6, 7, 8]}, params)
    samples: list[int] = []
    step_fn = core.step_fn

    def timed() -> Any:
        model_before, before = model.total_ns, time.thread_time_ns()
        result = step_fn()
        samples.append(time.thread_time_ns() - before - (model.total_ns - model_before))
        return result

    core.step_fn = timed
    try:
        while engine.has_unfinished_requests():
            engine.step()
    finally:
        core.step_fn = step_fn
    return statistics.median(samples[2 : tokens - 2])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="model directory (default: the demo's tiny model)")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--quartets", type=int, default=8)
    parser.add_argument("--executor", choices=("uni", "mp"), default="uni")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_LOGGING_LEVEL="ERROR",
    )  # fmt: skip
    # The hook records for real; where its records go does not matter here, so nobody listens.
    os.environ.setdefault("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    from vllm import LLM

    from stratoscope.demo import tiny_model

    model_dir = options.model or tiny_model.ensure(Path.home() / ".cache/stratoscope/demo", lambda _: None)
    llm = LLM(
        str(model_dir), enforce_eager=True, max_model_len=512, max_num_seqs=options.batch,
        max_num_batched_tokens=max(2048, 4 * options.batch), enable_prefix_caching=False,
        distributed_executor_backend=options.executor, disable_log_stats=True,
    )  # fmt: skip
    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    llm.generate("fox", use_tqdm=False)  # the first step puts the wrappers in
    model = ModelTime(core)
    block(engine, core, model, options.batch, options.tokens, "warm-up")
    from stratoscope.instrumentation import hook as hook_module

    hook = hook_module.installed()
    if hook is None:
        raise SystemExit("the hook is not loaded: is stratoscope installed in this environment?")
    recorder = hook.parts["core"].recorders[id(core)]
    toggle = Toggle(core, recorder)
    account = hook.account
    pairs: list[float] = []
    drift: list[float] = []
    on_ns: list[float] = []
    own: list[tuple[float, float]] = []
    for quartet in range(options.quartets):
        times: dict[str, list[float]] = {"A": [], "B": []}
        for position, mode in enumerate("ABBA" if quartet % 2 == 0 else "BAAB"):
            toggle.set(mode == "A")
            before = (account.critical_ns, account.overlapped_ns, account.steps)
            times[mode].append(
                block(engine, core, model, options.batch, options.tokens, f"q{quartet}-{position}")
            )
            if mode == "A":
                steps = account.steps - before[2]
                own.append(
                    ((account.critical_ns - before[0]) / steps, (account.overlapped_ns - before[1]) / steps)
                )
        pairs.append(statistics.mean(times["A"]) - statistics.mean(times["B"]))
        drift.append(times["B"][1] - times["B"][0])
        on_ns += times["A"]
    result = {
        "machine": machine.describe(),
        "batch": options.batch,
        "executor": options.executor,
        "steps_per_block": options.tokens,
        "quartets": options.quartets,
        "host_cpu_us_per_step": statistics.median(on_ns) / 1e3,
        "hook_cpu_us_per_step_median": statistics.median(pairs) / 1e3,
        "hook_cpu_us_per_step_quartiles": [q / 1e3 for q in statistics.quantiles(pairs, n=4)],
        "drift_us_per_step_median": statistics.median(drift) / 1e3,
        "own_clock_critical_us": statistics.median(c for c, _ in own) / 1e3,
        "own_clock_overlapped_us": statistics.median(o for _, o in own) / 1e3,
    }
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        for name, value in result.items():
            print(f"{name:34} {value}")
    os._exit(0)  # vLLM's in-process teardown can hang; nothing is left to flush


if __name__ == "__main__":
    main()
