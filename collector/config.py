"""The agent's configuration: a YAML file in the OpenTelemetry Collector's vocabulary.

Component ids are ``type`` or ``type/name``; ``${env:NAME}`` and ``${env:NAME:-default}`` are
replaced by environment variables, ``$$`` is a dollar sign. Everything is checked before anything
starts: :class:`ConfigError` carries all problems, each with its full key path.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import yaml

from stratoscope.collector import config_file, registry
from stratoscope.collector.component import Factory, Kind, Signal
from stratoscope.collector.config_file import ConfigError
from stratoscope.collector.config_schema import Duration, Problems, key, read, unknown_key


@dataclass(frozen=True)
class LogsConfig:
    """``service.telemetry.logs``"""

    level: Literal["debug", "info", "warn", "error"] = key("info", "Least severe level that the agent logs.")


@dataclass(frozen=True)
class TelemetryConfig:
    """``service.telemetry``"""

    logs: LogsConfig = key(LogsConfig(), "The agent's own log, on stderr.")


@dataclass(frozen=True)
class PipelineConfig:
    """``service.pipelines.<signal>[/name]``"""

    receivers: list[str] = key([], "Ids of the receivers that feed it.")
    processors: list[str] = key([], "Ids of the processors, in order.")
    exporters: list[str] = key([], "Ids of the exporters that it feeds.")

    def validate(self) -> Iterable[tuple[str, str]]:
        """A pipeline without a beginning or an end is a mistake."""
        for name in ("receivers", "exporters"):
            if not getattr(self, name):
                yield name, "must name at least one component"
        for name in ("receivers", "processors", "exporters"):
            ids = getattr(self, name)
            for twice in sorted({i for i in ids if ids.count(i) > 1}):
                yield name, f"names {twice!r} more than once"


@dataclass(frozen=True)
class ServiceConfig:
    """``service``, less the pipelines"""

    extensions: list[str] = key([], "Ids of the extensions to start.")
    telemetry: TelemetryConfig = key(TelemetryConfig(), "What the agent says of itself.")
    shutdown_timeout: Annotated[float, Duration(min_s=0.1, max_s=3600)] = key(
        10.0, "How long all flushing may take after SIGTERM."
    )


@dataclass(frozen=True)
class ComponentSpec:
    """One configured component: its id, how to build it, and its checked configuration."""

    id: str
    factory: Factory
    config: Any


@dataclass(frozen=True)
class AgentConfig:
    """A configuration that has passed every check."""

    components: dict[Kind, dict[str, ComponentSpec]]
    pipelines: dict[str, tuple[Signal, PipelineConfig]]
    service: ServiceConfig
    tree: dict[str, Any]  # as read, for --print-config; environment variables not expanded


def default_tree() -> dict[str, Any]:
    """The configuration used without a file: listen locally, attribute, serve the results."""
    plain = {"receivers": ["otlp"], "processors": ["memory_limiter", "batch"], "exporters": ["nop"]}
    return {
        "receivers": {
            "otlp": {
                "protocols": {"grpc": {"endpoint": "127.0.0.1:4317"}, "http": {"endpoint": "127.0.0.1:4318"}}
            }
        },
        "processors": {
            "memory_limiter": {"check_interval": "100ms", "limit_mib": 1024, "spike_limit_mib": 200},
            "attribution": {"spans": {"export": "none"}},  # nobody to export them to
            "batch": {"timeout": "200ms", "send_batch_size": 8192},
        },
        "exporters": {"prometheus": {}, "nop": {}},
        "extensions": {"api": {"endpoint": "127.0.0.1:9464"}},
        "service": {
            "extensions": ["api"],
            "pipelines": {
                "traces": {
                    "receivers": ["otlp"],
                    "processors": ["memory_limiter", "attribution", "batch"],
                    "exporters": ["prometheus"],
                },
                "metrics": copy.deepcopy(plain),
                "logs": copy.deepcopy(plain),
            },
        },
    }


def load(path: str | None = None, overrides: Iterable[str] = ()) -> AgentConfig:
    """Read ``path`` (``None``: the default), apply ``key=value`` overrides, check all of it.

    Raises :class:`ConfigError`.
    """
    tree = default_tree() if path is None else config_file.read(path)
    problems: Problems = []
    for text in overrides:
        config_file.override(tree, text, problems)
    if problems:
        raise ConfigError(problems)
    return check(tree)


def check(tree: Mapping[str, Any]) -> AgentConfig:
    """The checked form of a configuration tree. Raises :class:`ConfigError` with all problems."""
    problems: Problems = []
    expanded = config_file.expand(dict(tree), "", problems)
    sections = {kind.value for kind in Kind} | {"service"}
    problems.extend(unknown_key(str(name), str(name), sections) for name in expanded if name not in sections)
    components = {kind: _components(kind, expanded.get(kind.value), problems) for kind in Kind}
    service_tree = expanded.get("service")
    if not isinstance(service_tree, dict):
        problems.append("service: is required, with at least one pipeline under service.pipelines")
        raise ConfigError(problems)
    rest = {name: value for name, value in service_tree.items() if name != "pipelines"}
    service = read(ServiceConfig, rest, "service", problems)
    pipelines = _pipelines(service_tree.get("pipelines"), components, problems)
    if service is not None:
        _references(service.extensions, "service.extensions", Kind.EXTENSION, components, problems)
    if problems:
        raise ConfigError(problems)
    specs = {kind: {i: s for i, s in by_id.items() if s is not None} for kind, by_id in components.items()}
    return AgentConfig(specs, pipelines, service, copy.deepcopy(dict(tree)))


def dump(config: AgentConfig) -> str:
    """The configuration as YAML, as it was read (secrets from the environment stay out)."""
    return str(yaml.safe_dump(config.tree, sort_keys=False))


def _components(kind: Kind, section: Any, problems: Problems) -> dict[str, ComponentSpec | None]:
    """Specs by id; ``None`` for one with problems, so that references to it are not problems too."""
    if section is None:
        return {}
    if not isinstance(section, dict):
        problems.append(f"{kind.value}: must be a mapping of component ids")
        return {}
    specs: dict[str, ComponentSpec | None] = {}
    for raw_id, data in section.items():
        component_id = str(raw_id)
        path = f"{kind.value}.{component_id}"
        type_name, slash, name = component_id.partition("/")
        specs[component_id] = None
        if slash and not name:
            problems.append(f"{path}: the name after the slash is empty")
        elif type_name not in registry.types(kind):
            problems.append(unknown_key(path, type_name, registry.types(kind)))
        else:
            factory = registry.find(kind, type_name)
            config = read(factory.config, data, path, problems)
            if config is not None:
                specs[component_id] = ComponentSpec(component_id, factory, config)
    return specs


def _pipelines(
    section: Any, components: dict[Kind, dict[str, ComponentSpec | None]], problems: Problems
) -> dict[str, tuple[Signal, PipelineConfig]]:
    pipelines: dict[str, tuple[Signal, PipelineConfig]] = {}
    if not isinstance(section, dict) or not section:
        problems.append("service.pipelines: must hold at least one of traces, metrics, logs")
        return pipelines
    for name, data in section.items():
        path = f"service.pipelines.{name}"
        signal = str(name).partition("/")[0]
        if signal not in list(Signal):
            problems.append(unknown_key(path, signal, [s.value for s in Signal]))
            continue
        config = read(PipelineConfig, data, path, problems)
        if config is None:
            continue
        pipelines[str(name)] = (Signal(signal), config)
        for kind in (Kind.RECEIVER, Kind.PROCESSOR, Kind.EXPORTER):
            where = f"{path}.{kind.value}"
            _references(getattr(config, kind.value), where, kind, components, problems, Signal(signal))
    return pipelines


def _references(
    ids: list[str],
    path: str,
    kind: Kind,
    components: dict[Kind, dict[str, ComponentSpec | None]],
    problems: Problems,
    signal: Signal | None = None,
) -> None:
    known = components[kind]
    for component_id in ids:
        spec = known.get(component_id)
        if component_id not in known:
            text = unknown_key(path, component_id, known).replace(
                "unknown key", f"{component_id!r} is not defined"
            )
            problems.append(f"{text} (define it under {kind.value})")
        elif spec is not None and signal is not None and signal not in spec.factory.signals:
            allowed = ", ".join(sorted(spec.factory.signals))
            problems.append(f"{path}: {component_id!r} does not handle {signal}, only {allowed}")
