# `make` lists the targets.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN = $(VENV)/bin
DEMO = .demo

.DEFAULT_GOAL := help
.PHONY: help install demo test lint types tests mutate fuzz bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/installed ## quanterr and its development tools, in .venv

# torch first: which build of it is wanted is not this project's business, and the next line keeps it.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: install ## quantize a real model to FP8 and INT8, compare both, show the reports
	$(BIN)/python examples/demo.py $(DEMO)

test: lint types tests ## lint, types and tests: what CI runs

lint: install ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install ## mypy, strict
	$(BIN)/mypy

tests: install ## pytest
	$(BIN)/python -m pytest -q

mutate: install ## breaks every golden file in many ways and counts what is noticed (minutes)
	$(BIN)/python tests/mutate.py

N ?= 1000000
TARGETS ?=

fuzz: install ## N inputs (1000000) of each of the TARGETS (all); hours
	PYTHONPATH=tests $(BIN)/python -m fuzz -n $(N) $(TARGETS)

bench: install ## weights/s of each format; speed and memory beside a plain script and plain reading (minutes)
	$(BIN)/python tests/bench/formats.py
	$(BIN)/python tests/bench/bench.py

clean: ## what the other targets made
	rm -rf $(VENV) $(DEMO) .bench .fuzz .pytest_cache .mypy_cache .ruff_cache .hypothesis
