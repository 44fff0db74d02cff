"""One distribution from top-level folders: complete, light, and kept apart where it must be."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = ("attribution", "cli", "collector", "dashboards", "demo", "deploy", "instrumentation")
MODULES = sorted(
    path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if "vllm-cpu" not in path.parts
)
IMPURE = {
    "asyncio", "datetime", "glob", "grpc", "http", "io", "logging", "os", "pathlib", "random", "requests",
    "shutil", "socket", "subprocess", "sys", "tempfile", "threading", "time", "torch", "urllib", "vllm",
}  # fmt: skip


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module or "")
    return found


def test_every_package_is_listed() -> None:
    found = {
        "stratoscope." + ".".join(path.parent.relative_to(ROOT).parts)
        for path in MODULES
        if (path.parent / "__init__.py").exists()
    }
    assert found == set(PROJECT["tool"]["setuptools"]["packages"])
    without = [path for path in MODULES if not (path.parent / "__init__.py").exists()]
    assert not without, "folders with modules need an __init__.py"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_through_the_namespace(path: Path) -> None:
    assert not {name for name in imports(path) if name.split(".")[0] in FOLDERS}


def test_attribution_is_pure() -> None:
    for path in (ROOT / "attribution").glob("*.py"):
        allowed = {"sys", "pathlib"} if path.name == "docs.py" else set()
        assert not {name.split(".")[0] for name in imports(path)} & (IMPURE - allowed), path.name


def test_the_hook_knows_nothing_of_the_agent() -> None:
    for path in (ROOT / "instrumentation").rglob("*.py"):
        assert not [
            n for n in imports(path) if n.startswith(("stratoscope.collector", "stratoscope.attribution"))
        ]


def test_modules_are_short() -> None:
    long = {
        str(path.relative_to(ROOT)): n for path in MODULES if (n := len(path.read_text().splitlines())) > 400
    }
    assert not long


def test_wire_names_are_defined_once() -> None:
    """A literal stratoscope.* attribute outside semconv.py would be a second definition."""
    pattern = re.compile(
        r"stratoscope\.(t|step|hook|clock|process|engine|record|rows|columns|events|flushes)\b"
    )
    for path in MODULES:
        if path.name in ("semconv.py", "semconv_docs.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
                assert not pattern.match(node.value), f"{path}: {node.value}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "uv", "build", "--wheel", "--out-dir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_is_whole_and_light(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = next(archive.read(n).decode() for n in names if n.endswith("METADATA"))
        entry_points = next(archive.read(n).decode() for n in names if n.endswith("entry_points.txt"))
    assert {f"stratoscope/{path.relative_to(ROOT)}" for path in MODULES} <= names
    assert "stratoscope/__init__.py" not in names, "a namespace: other distributions may add to it"
    needed = re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra ==)", metadata, re.M)
    assert sorted(needed) == ["nvidia-ml-py", "opentelemetry-exporter-otlp", "opentelemetry-sdk"]
    assert "[vllm.general_plugins]\nstratoscope = stratoscope.instrumentation.plugin:load" in entry_points


def test_the_wheel_works_alone(wheel: Path, tmp_path: Path) -> None:
    """In an environment with nothing else the command helps, and the hook is off without an endpoint."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env/bin/python"
    install = [sys.executable, "-m", "uv", "pip", "install", "--python", str(python), "--no-deps", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, text=True)
    command = tmp_path / "env/bin/stratoscope"
    helped = subprocess.run([command, "--help"], capture_output=True, text=True, check=True)
    assert "stratoscope demo" in helped.stdout
    agent = subprocess.run([command, "agent"], capture_output=True, text=True, check=False)
    assert agent.returncode == 2 and "stratoscope[agent]" in agent.stderr
    code = (
        "import sys; from stratoscope.instrumentation import plugin; plugin.load();"
        "print('opentelemetry' in sys.modules)"
    )
    off = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, env={})
    assert off.stdout.strip() == "False"
