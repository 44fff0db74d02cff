"""Prometheus metrics of finished requests: exact sums, bounded labels, counters that never fall."""

from __future__ import annotations

import dataclasses

import pytest
from prometheus_client import CollectorRegistry

from stratoscope.attribution.attribute import E2E
from stratoscope.attribution.matrix import PercentileBands
from stratoscope.collector.assembler import Limits
from stratoscope.collector.attributor import Attributor, Options
from stratoscope.collector.metrics import MAX_MODELS, RequestMetrics


@pytest.fixture
def core(vllm):
    core = Attributor(Options(Limits(), PercentileBands()))
    for message in vllm(4).messages():
        core.take(message, 0.0)
    return core


def samples(registry, name):
    return [s for family in registry.collect() for s in family.samples if s.name == name]


def test_seconds_add_up_to_the_latencies(core):
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry, core)
    core.on_finished(metrics.observe)
    finished = core.finish(1.0, at_end=True)
    found = samples(registry, "stratoscope_request_seconds_total")
    total = sum(s.value for s in found if s.labels["phase"] == "e2e")
    assert total == pytest.approx(sum(int(r.latency_ns[E2E]) for r in finished) / 1e9)
    assert registry.get_sample_value("stratoscope_e2e_seconds_count", {"model_name": "tiny"}) == 4
    assert registry.get_sample_value("stratoscope_itl_seconds_count", {"model_name": "tiny"}) == 4
    steps = registry.get_sample_value("stratoscope_hook_steps_total", {"role": "engine_core"})
    assert steps == 7


def test_models_are_bounded(core):
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry, core)
    request = core.finish(1.0, at_end=True)[0]
    for number in range(MAX_MODELS + 10):
        metrics.observe(
            dataclasses.replace(request, attributes={**request.attributes, "model": f"m{number}"})
        )
    models = {s.labels["model_name"]: s.value for s in samples(registry, "stratoscope_requests_total")}
    assert len(models) == MAX_MODELS + 1
    assert models["other"] == 10


def test_hook_counters_do_not_fall_when_a_process_is_forgotten():
    class Hooks:
        def __init__(self):
            self.rows = [{"process_uid": "a", "role": "worker", "dropped": 3}]

        def hook_status(self):
            return self.rows

    hooks, registry = Hooks(), CollectorRegistry()
    RequestMetrics(registry, hooks)
    name, labels = "stratoscope_hook_dropped_records_total", {"role": "worker"}
    assert registry.get_sample_value(name, labels) == 3
    hooks.rows = [{"process_uid": "b", "role": "worker", "dropped": 2}]
    assert registry.get_sample_value(name, labels) == 5
    hooks.rows = []
    assert registry.get_sample_value(name, labels) == 5
    hooks.rows = [{"process_uid": "a", "role": "worker", "dropped": 4}]  # back again: one more, not four
    assert registry.get_sample_value(name, labels) == 6
