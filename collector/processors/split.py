"""Takes a batch apart into batches of a bounded number of items, keeping resource and scope."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from stratoscope.collector.component import Batch, Signal
from stratoscope.collector.otlp import REQUEST, data_points

# signal: the repeated fields of the request, the resource entry and the scope entry
_LEVELS: Final = {
    Signal.TRACES: ("resource_spans", "scope_spans", "spans"),
    Signal.METRICS: ("resource_metrics", "scope_metrics", "metrics"),
    Signal.LOGS: ("resource_logs", "scope_logs", "log_records"),
}


def split(batch: Batch, max_items: int) -> Iterator[Batch]:
    """Batches of at most ``max_items`` in the order of the original.

    A single metric is never divided, so one with more points makes a batch of its own.
    """
    resources, scopes, leaves = _LEVELS[batch.signal]
    request: Any = REQUEST[batch.signal]()
    count = 0
    for resource in getattr(batch.message, resources):
        resource_out = None
        for scope in getattr(resource, scopes):
            scope_out = None
            for leaf in getattr(scope, leaves):
                size = data_points(leaf) if batch.signal is Signal.METRICS else 1
                if count and count + size > max_items:
                    yield Batch(batch.signal, request, request.SerializeToString(), count)
                    request, count = REQUEST[batch.signal](), 0
                    resource_out = scope_out = None
                if resource_out is None:
                    resource_out = getattr(request, resources).add(schema_url=resource.schema_url)
                    resource_out.resource.CopyFrom(resource.resource)
                if scope_out is None:
                    scope_out = getattr(resource_out, scopes).add(schema_url=scope.schema_url)
                    scope_out.scope.CopyFrom(scope.scope)
                getattr(scope_out, leaves).append(leaf)
                count += size
    if count:
        yield Batch(batch.signal, request, request.SerializeToString(), count)
