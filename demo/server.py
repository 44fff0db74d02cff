"""A real vLLM OpenAI server with the hook, as a child process.

The hook needs no argument: it is loaded by vLLM as a plugin and turned on by the OTLP endpoint in
the environment, exactly as in production.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stratoscope.demo.process import ManagedProcess
from stratoscope.demo.vllm_serve import ASYNC_ENV, PARENT_ENV

MODEL_NAME = "tiny-llama"
READY_TIMEOUT_S = 300.0
CPU_BLOCK_TOKENS = 128  # of a KV cache block, in vLLM's CPU build
# Variables of the caller's that would change what is measured, or send it elsewhere.
_DROPPED = ("OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "VLLM_PLUGINS")


@dataclass(frozen=True)
class ServerOptions:
    """How vLLM is started. ``kv_blocks`` overrides the number of KV cache blocks, of
    :data:`CPU_BLOCK_TOKENS` tokens each."""

    max_model_len: int = 2048
    max_num_seqs: int = 16
    max_num_batched_tokens: int | None = None
    kv_blocks: int | None = None
    tensor_parallel_size: int = 1
    api_server_count: int = 1
    async_scheduling: bool = False
    prefix_caching: bool = True
    log_level: str = "INFO"
    extra_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)  # last word over the environment

    def arguments(self, model_dir: Path, port: int) -> list[str]:
        """Arguments of ``vllm serve``."""
        args = ["serve", str(model_dir), "--served-model-name", MODEL_NAME]
        args += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
        args += ["--max-model-len", str(self.max_model_len), "--max-num-seqs", str(self.max_num_seqs)]
        if self.max_num_batched_tokens is not None:
            args += ["--max-num-batched-tokens", str(self.max_num_batched_tokens)]
        if self.kv_blocks is not None:
            args += ["--num-gpu-blocks-override", str(self.kv_blocks)]
        if self.tensor_parallel_size > 1:
            args += ["--tensor-parallel-size", str(self.tensor_parallel_size)]
        if self.api_server_count > 1:
            args += ["--api-server-count", str(self.api_server_count)]
        if not self.prefix_caching:
            args.append("--no-enable-prefix-caching")
        return [*args, *self.extra_args]

    def environment(self, otlp_endpoint: str | None, protocol: str = "grpc") -> dict[str, str]:
        """Environment of the server; without ``otlp_endpoint`` the hook stays off."""
        env = {name: value for name, value in os.environ.items() if name not in _DROPPED}
        env.pop("OTEL_EXPORTER_OTLP_ENDPOINT", None)
        env |= {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": self.log_level,
            "VLLM_NO_USAGE_STATS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            PARENT_ENV: str(os.getpid()),
        }
        if otlp_endpoint is not None:
            env["OTEL_EXPORTER_OTLP_ENDPOINT"] = otlp_endpoint
            env["OTEL_EXPORTER_OTLP_PROTOCOL"] = protocol
            env["OTEL_SERVICE_NAME"] = "vllm-demo"
        if self.tensor_parallel_size > 1:
            env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
                str(core) for core in range(self.tensor_parallel_size)
            )
        if self.async_scheduling:
            env[ASYNC_ENV] = "1"
        return env | dict(self.env)


class VllmServer(ManagedProcess):
    """``vllm serve`` of the tiny model on ``port``; construct, then :meth:`wait_healthy`."""

    def __init__(
        self, model_dir: Path, port: int, options: ServerOptions, otlp_endpoint: str | None, log_path: Path
    ) -> None:
        command = [sys.executable, "-m", "stratoscope.demo.vllm_serve", *options.arguments(model_dir, port)]
        super().__init__("vLLM", command, options.environment(otlp_endpoint), log_path)
        self.base_url = f"http://127.0.0.1:{port}"
        self.health_url = f"{self.base_url}/health"


def vllm_version() -> str | None:
    """Version of the vLLM in this environment, or ``None`` without one."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
