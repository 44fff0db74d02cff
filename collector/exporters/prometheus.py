"""The ``prometheus`` exporter: turns on ``/metrics`` at the ``api`` extension.

The metrics are those of the attribution and of the agent itself. Batches end here: spans are not
metrics, and what the attribution makes of them does not pass through an exporter.
"""

from __future__ import annotations

from dataclasses import dataclass

from stratoscope.collector.component import Batch, Context, Factory, Kind


@dataclass(frozen=True)
class Config:
    """``exporters.prometheus`` has no keys: the address is ``extensions.api.endpoint``."""


class PrometheusExporter:
    """Takes everything and keeps nothing."""

    def consume(self, batch: Batch) -> None:
        """Let it go."""


def build(name: str, config: Config, context: Context) -> PrometheusExporter:
    """Make the exporter, and have the API serve ``/metrics``."""
    context.prometheus = True
    return PrometheusExporter()


factory = Factory(Kind.EXPORTER, "prometheus", Config, build)
