# Everything happens in .venv, which is made when it is first needed. Each stamp in it stands for what was installed.
#
#   make finetune NPROC=4 ARGS="--train biases --steps 500"
#   make test ARGS="-k parity"

PYTHON ?= python3
NPROC ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint requirements/lock.txt

# As many processes as there are GPUs, or two; each with its share of the processors.
LAUNCH := set -- $$($(BIN)/python -c 'import os, torch; n = int("$(NPROC)" or torch.cuda.device_count() or 2); print(n, max(1, os.cpu_count() // n))'); \
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$$2} $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $$1

LOW_BIT := $(CURDIR)/$(VENV)/low-bit

PYTEST := TORCH_DISTRIBUTED_DEBUG=DETAIL $(BIN)/python -m pytest

# Without ARGS tests run in three parts at once: most wait for processes and threads of their own more than they compute.
FIRST := tests/core tests/device tests/guards tests/pairs tests/quantized tests/resilience
SECOND := tests/checkpoint tests/comm tests/huggingface tests/offload tests/optim tests/planning
THIRD := $(patsubst %,--ignore %,$(FIRST) $(SECOND))
pytest = $(if $(ARGS),$(PYTEST) $(1) $(ARGS),parts=$$(mktemp -d); \
	$(PYTEST) $(1) $(FIRST) > $$parts/first 2>&1 & first=$$!; $(PYTEST) $(1) $(SECOND) > $$parts/second 2>&1 & second=$$!; \
	$(PYTEST) $(1) $(THIRD); failed=$$?; wait $$first || failed=1; wait $$second || failed=1; \
	cat $$parts/first $$parts/second; rm -r $$parts; exit $$failed)

# What .ci/run needs, and the parts that it runs beside all else.
STAMPS := examples tests dev docs trl package deepspeed low-bit

.DEFAULT_GOAL := help
.PHONY: help install first-part second-part third-part finetune sft test test-all deepspeed low-bit notebook trackers optimizers lint types docs site package soak mutants versions clean
.NOTPARALLEL:  # two installations would get in each other's way

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

finetune: $(VENV)/.examples $(if $(findstring 8bit,$(ARGS)),$(VENV)/.low-bit)  ## fine-tune a small language model, on all GPUs or else in two CPU processes (NPROC, ARGS)
	@$(if $(findstring 8bit,$(ARGS)),export PYTHONPATH=$(LOW_BIT):$$PYTHONPATH;) $(LAUNCH) examples/finetune.py $(ARGS)

sft: $(VENV)/.examples $(VENV)/.trl  ## fine-tune a small model on chats, with TRL, likewise (NPROC, ARGS)
	@$(LAUNCH) examples/sft.py $(ARGS)

test: $(VENV)/.examples $(VENV)/.tests  ## run the tests, but for those marked slow (ARGS go to pytest)
	@$(call pytest,-m "not slow")

test-all: $(VENV)/.examples $(VENV)/.tests  ## run all tests (ARGS go to pytest)
	@$(call pytest,)

install: $(STAMPS:%=$(VENV)/.%)

first-part: PART = $(FIRST)
second-part: PART = $(SECOND)
third-part: PART = $(THIRD)
first-part second-part third-part: $(VENV)/.examples $(VENV)/.tests
	@$(PYTEST) $(if $(SLOW),--slow-part $(SLOW)) $(PART)

deepspeed: $(VENV)/.examples $(VENV)/.tests $(VENV)/.deepspeed  ## run the tests in which DeepSpeed takes part (the others do without it)
	PYTHONPATH=$(CURDIR)/$(VENV)/deepspeed:$$PYTHONPATH $(BIN)/python -m pytest tests/formats/test_deepspeed.py tests/guards/test_wrappers.py tests/sequences/test_ulysses.py -k "deepspeed_itself or likeness" $(ARGS)

low-bit: $(VENV)/.examples $(VENV)/.tests $(VENV)/.low-bit  ## run the tests of quantised weights, and of 8-bit and 4-bit optimizers, with bitsandbytes and torchao installed
	PYTHONPATH=$(LOW_BIT):$$PYTHONPATH $(BIN)/python -m pytest $(if $(SLOW),--slow-part $(SLOW)) tests/optim/test_low_bit.py tests/examples/test_finetune_low_bit.py tests/quantized/test_bitsandbytes.py tests/quantized/test_operations.py tests/quantized/test_loading_codes.py tests/quantized/test_other_libraries.py $(ARGS)

notebook: $(VENV)/.examples $(VENV)/.tests $(VENV)/.notebook  ## run the quick start's notebook by nbconvert, which the other tests do without
	JUPYTER_PATH=$(CURDIR)/$(VENV)/notebook/share/jupyter PYTHONPATH=$(CURDIR)/$(VENV)/notebook:$$PYTHONPATH $(BIN)/python -m pytest tests/docs/test_notebook.py $(ARGS)

trackers: $(VENV)/.examples $(VENV)/.tests $(VENV)/.trackers  ## run the tests of report_to with tensorboard and wandb, offline
	PYTHONPATH=$(CURDIR)/$(VENV)/trackers:$$PYTHONPATH $(BIN)/python -m pytest tests/integrations/test_trackers.py $(ARGS)

optimizers: $(VENV)/.examples $(VENV)/.tests $(VENV)/.low-bit  ## print which optimizers are exact, and what to give them: docs/optimizers.md's table
	@PYTHONPATH=$(LOW_BIT):$$PYTHONPATH $(BIN)/python -m tests.support.optimizers

lint: $(VENV)/.dev  ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev  ## check the types of zero3/
	$(BIN)/mypy

docs: $(VENV)/.docs  ## build the documentation's site, docs/_build/html; a warning is an error
	$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --nitpicky --quiet docs docs/_build/html $(ARGS)
	@echo "Open docs/_build/html/index.html"

site: docs  ## build the site, and render every page in Chromium at the width of a desk and of a phone: is anything cut off?
	@command -v chromium > /dev/null || command -v google-chrome > /dev/null || { \
		apt-get -qq -o Acquire::Retries=3 update && apt-get -qq -y -o Acquire::Retries=3 install --no-install-recommends chromium > /dev/null; }
	$(BIN)/python tests/rendered_site.py $(ARGS)

package: $(VENV)/.tests $(VENV)/.package  ## build dist/: a wheel and a source distribution; are they whole, the same bytes each time, and do its tests run?
	rm -rf build dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python tests/package.py dist

soak: $(VENV)/.tests  ## train MINUTES (30) while faults are injected (ARGS: --seed, --nights, --output), and draw some thousand lives and triples of capabilities at random
	$(BIN)/python -m tests.soak $(or $(MINUTES),30) $(ARGS)
	$(BIN)/python -m tests.device.soak $(or $(MINUTES),30)
	$(BIN)/python -m tests.pairs --triples $(or $(EXAMPLES),3000)
	ZERO3_EXAMPLES=$(or $(EXAMPLES),3000) $(BIN)/python -m pytest -q -o timeout=0 -o faulthandler_timeout=0 tests/core/test_stateful.py tests/core/test_ordering_fuzz.py

mutants: $(VENV)/.examples $(VENV)/.tests  ## put faults into a copy of the package, one at a time: do the tests see each? SEED=7 COUNT=100 draws them
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants $(if $(SEED)$(COUNT),--seed $(or $(SEED),0) --count $(or $(COUNT),100)) $(ARGS)

versions:  ## test versions of torch, transformers and peft in environments of their own (.versions/), and write docs/reliability.md's table
	$(PYTHON) -m tests.versions $(ARGS)

clean:  ## remove the virtual environment and everything else that can be made again
	rm -rf $(VENV) .versions build dist docs/_build finetuned sft quickstart-run *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and by its exact version: any other request may bring another build, with gigabytes around it.
$(VENV)/.torch: requirements/lock.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "zero3 needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	@echo "Installing torch into $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) $$(grep '^torch==' requirements/lock.txt)
	@$(PIP) setuptools
	@touch $@

# The package is installed as it stands here, with one of its extras.
$(VENV)/.%: $(VENV)/.torch pyproject.toml
	@echo "Installing zero3[$*] into $(VENV)"
	@$(PIP) --no-build-isolation --editable '.[$*]'
	@touch $@

# In a folder of its own: accelerate and transformers would import it wherever they find it. It compiles nothing.
$(VENV)/.deepspeed: $(VENV)/.tests
	@echo "Installing DeepSpeed into $(VENV)/deepspeed"
	@$(PIP) --no-build-isolation --upgrade --target $(VENV)/deepspeed --no-deps deepspeed einops hjson msgpack ninja py-cpuinfo
	@$(BIN)/python -c 'import sys; sys.path.insert(0, "$(VENV)/deepspeed"); import deepspeed' > $@.log 2>&1 || { cat $@.log; exit 1; }
	@touch $@

# Likewise: nbconvert brings forty packages, of which none is for the other tests.
$(VENV)/.notebook: $(VENV)/.tests
	@echo "Installing nbconvert and ipykernel into $(VENV)/notebook"
	@$(PIP) --upgrade --target $(VENV)/notebook nbconvert ipykernel
	@touch $@

# Likewise: transformers would report to what it finds.
$(VENV)/.trackers: $(VENV)/.tests
	@echo "Installing tensorboard and wandb into $(VENV)/trackers"
	@$(PIP) --upgrade --target $(VENV)/trackers tensorboard wandb
	@touch $@

# Likewise: peft and transformers would import them, which takes seconds in each process.
$(VENV)/.low-bit: $(VENV)/.examples
	@echo "Installing bitsandbytes, torchao and other libraries of optimizers into $(VENV)/low-bit"
	@$(PIP) --upgrade --target $(LOW_BIT) --no-deps bitsandbytes torchao schedulefree grokadamw torch-optimi
	@touch $@
