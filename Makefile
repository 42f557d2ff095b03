# Everything that a fresh machine with git, make and python3 needs. `make` alone lists the targets.
#
# What is installed is remembered by stamp files inside the virtual environment, chained one after the other, so that
# `make -j` is safe and nothing is installed again until pyproject.toml, constraints.txt or the Python version changes.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
MOMENTS ?= 50
PORT ?= 8000
PYTEST_ARGS ?=

# Tests start hundreds of processes, each of which would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || echo none)
MADE := $(VENV)/.made-$(VERSION)
TORCH := $(VENV)/.torch-$(VERSION)
INSTALLED := $(VENV)/.installed-$(VERSION)
DEVELOP := $(VENV)/.develop-$(VERSION)
SOURCES := $(wildcard src tests benchmarks examples docs)

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18
	@echo "  variables: PYTHON=$(PYTHON) VENV=$(VENV) WORKERS=$(WORKERS) PYTEST_ARGS='-k name'"

.PHONY: install
install: $(INSTALLED) ## set up the virtual environment with the package and all extras

.PHONY: train
train: $(INSTALLED) ## train the handwritten digits on WORKERS workers
	$(BIN)/unisono train digits --workers $(WORKERS)

.PHONY: test
test: $(DEVELOP) system ## install what the tests need and run them on all cores, of long tables a short form
	$(call pytest,not long and)

.PHONY: test-all
test-all: $(DEVELOP) system ## the same with every row of every table
	$(call pytest)

# 5: nothing was selected.
define pytest
	$(BIN)/python -m pytest -m '$(strip $(1) alone)' $(PYTEST_ARGS) || [ $$? = 5 ]
	$(BIN)/python -m pytest -m '$(strip $(1) not alone)' -n auto --dist worksteal $(PYTEST_ARGS) || [ $$? = 5 ]
endef

.PHONY: check
check: static test ## the gate: format, lint, types, walls, docs, tests

.PHONY: static
static: format-check lint types walls audit docs ## the gate without the tests

.PHONY: format-check
format-check: $(DEVELOP)
	$(BIN)/ruff format --check $(SOURCES)

.PHONY: lint
lint: $(DEVELOP)
	$(BIN)/ruff check $(SOURCES)

.PHONY: types
types: $(DEVELOP)
	$(BIN)/mypy

.PHONY: walls
walls: $(DEVELOP)
	$(BIN)/lint-imports

# What is installed has the pinned hashes; here, that no requirement is missing or of a version that another one excludes.
# Known vulnerabilities are listed by services on the network, which a gate without one cannot ask.
.PHONY: audit
audit: $(DEVELOP)
	$(BIN)/python -m pip --disable-pip-version-check check

# Without the network. UNISONO_DOCS_INTERSPHINX=1 adds links to the pages of Python and torch, whose lists are fetched.
.PHONY: docs
docs: $(DEVELOP) ## build the documentation site in build/docs; a warning is an error
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --jobs auto docs build/docs

.PHONY: docs-serve
docs-serve: docs ## show it on http://127.0.0.1:PORT of this host
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/docs $(PORT)

.PHONY: format
format: $(DEVELOP) ## write the sources in the house's format
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

.PHONY: bench
bench: $(DEVELOP) ## run every benchmark, with its peers, and say which claims hold
	$(BIN)/python -m benchmarks

.PHONY: campaign
campaign: $(DEVELOP) ## kill a training run at MOMENTS random moments, and see that it always resumes
	$(BIN)/python -m tests.campaigns.kills --moments $(MOMENTS)

.PHONY: chaos
chaos: $(DEVELOP) ## try 100 seeds of faults on made-up runs of two tasks, and 20 on real ones (an hour)
	$(BIN)/python -m tests.campaigns.chaos --virtual 100 --real 20

.PHONY: layouts
layouts: $(DEVELOP) ## train models of every kind under every layout, and on from what every other has saved
	$(BIN)/python -m tests.campaigns.layouts

.PHONY: loops
loops: $(DEVELOP) ## run training loops of every kind on several workers, and under DistributedDataParallel beside it
	$(BIN)/python -m tests.campaigns.loop_cases

# The oldest versions that pyproject.toml admits. Tests that need newer tools of their own are left out.
LOWEST := .venv-lowest/bin/python
.PHONY: lowest
lowest: $(DEVELOP) ## run what uses the core dependencies with the oldest versions that are allowed
	$(PYTHON) -m venv --clear .venv-lowest
	$(LOWEST) -m pip install --quiet "$$(grep '^torch==' requirements/lowest.txt)"
	$(LOWEST) -m pip install --quiet -r requirements/lowest.txt 'setuptools>=77.0.3' \
		pytest pytest-xdist pytest-timeout hypothesis psutil safetensors httpx2
	$(LOWEST) -m pip install --quiet --no-deps -e .
	$(LOWEST) -m pytest -n auto -m 'not long and not alone' tests/membership tests/cli tests/data \
		tests/run/test_elastic_run.py tests/comm/test_token_store.py tests/comm/test_protection.py \
		tests/comm/test_hostile_peers.py tests/comm/test_actors.py tests/checkpoint/test_round_trip.py \
		--ignore tests/membership/test_fuzz.py --ignore tests/membership/test_heartbeat_protocol.py

.PHONY: system
system:
	@.ci/system-packages

.PHONY: clean
clean: ## remove the virtual environment and what tools left behind; runs/ stays
	rm -rf $(VENV) .venv-lowest build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# Another Python version makes its own stamp, and with it the environment anew.
$(MADE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "unisono needs Python 3.11 or newer; $(PYTHON) is $(VERSION). Try make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || .ci/system-packages venv $(VERSION)
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# torch by itself and first: its version decides which build of everything else fits.
$(TORCH): constraints.txt $(MADE)
	$(PIP) --no-deps "$$(grep -m1 '^torch==' constraints.txt)"
	@touch $@

# Then what is pinned, and only if it has the hashes that are kept here (.ci/hashes writes them). What another Python or
# build of torch needs besides comes with the package.
$(INSTALLED): pyproject.toml constraints.txt requirements/run.txt $(TORCH)
	$(PIP) --no-deps --require-hashes -r requirements/run.txt
	$(PIP) -c constraints.txt -e '.[all]'
	@touch $@

$(DEVELOP): requirements/dev.txt $(INSTALLED)
	$(PIP) --no-deps --require-hashes -r requirements/dev.txt
	$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@
