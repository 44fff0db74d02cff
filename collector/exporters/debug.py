"""The ``debug`` exporter logs what passes; the ``nop`` exporter ends a pipeline without a trace."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from google.protobuf import text_format

from stratoscope.collector.component import Batch, Context, Factory, Kind
from stratoscope.collector.config_schema import key
from stratoscope.collector.telemetry import ITEM_NAME

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Config:
    """``exporters.debug``"""

    verbosity: Literal["basic", "detailed"] = key(
        "basic", "basic: one line a batch; detailed: every field of it."
    )


@dataclass(frozen=True)
class NopConfig:
    """``exporters.nop`` has no keys"""


class DebugExporter:
    """Writes to the agent's log."""

    def __init__(self, name: str, detailed: bool) -> None:
        self._name, self._detailed = name, detailed

    def consume(self, batch: Batch) -> None:
        """Log one batch."""
        log.info("%s: %d %s, %d bytes", self._name, batch.items, ITEM_NAME[batch.signal], len(batch.raw))
        if self._detailed:
            log.info("%s: %s", self._name, text_format.MessageToString(batch.message))


class NopExporter:
    """Takes everything, does nothing."""

    def consume(self, batch: Batch) -> None:
        """Forget one batch."""


def build(name: str, config: Config, context: Context) -> DebugExporter:
    """Make the debug exporter."""
    return DebugExporter(name, config.verbosity == "detailed")


def build_nop(name: str, config: NopConfig, context: Context) -> NopExporter:
    """Make the nop exporter."""
    return NopExporter()


factory = Factory(Kind.EXPORTER, "debug", Config, build)
nop_factory = Factory(Kind.EXPORTER, "nop", NopConfig, build_nop)
