# Everything runs in its own environment. `make serve ARGS="--port 8123"` passes options on;
# PIP_ARGS reaches pip (for example a CPU-only package index).
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
ARGS ?=
BIN = $(VENV)/bin

.PHONY: serve test check soak bench clean

serve: $(VENV)/.run
	$(BIN)/merestone serve $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --dist loadfile $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layout.py

soak: $(VENV)/.dev
	$(BIN)/python -m bench.soak $(ARGS)

bench: $(VENV)/.dev
	$(BIN)/python -m bench.cpu $(ARGS)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -e .
	touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -e ".[dev]"
	touch $@ $(VENV)/.run

clean:
	rm -rf $(VENV) build dist src/*.egg-info
