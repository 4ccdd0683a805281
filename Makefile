# `make help` lists the targets. Each makes its own environment and builds on first use, and is quick afterwards.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch>=2.11
ARGS ?=

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

python := $(VENV)/bin/python
pip := $(python) -m pip --disable-pip-version-check install
sources := $(shell find csrc CMakeLists.txt setup.py pyproject.toml -type f)
cpp_sources := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.PHONY: help demo test lint bench gpu clean

help:  ## Show this list.
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile | expand -t 16
	@echo
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) TORCH=\"$(TORCH)\" ARGS=\"options of the command that is run\""

demo: $(VENV)/built  ## Train a small transformer on real text, and compare the backends.
	@$(python) -m dsaccel.demo $(ARGS)

test: $(VENV)/built  ## Run all tests; what needs a GPU is skipped without one.
	@$(python) -m pytest $(ARGS)

lint: $(VENV)/built  ## Check style, types and spelling.
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/clang-format --dry-run --Werror $(cpp_sources)
	@$(VENV)/bin/codespell
	@$(VENV)/bin/mypy

bench: $(VENV)/built  ## Time the ops against their peers.
	@$(python) -m benchmarks $(ARGS)

# Nothing is downloaded: the machine's own Python must bring torch, setuptools, cmake and pytest; of its plugins none is
# asked for. The benchmarks run even where a test fails.
gpu_tests := $(shell grep -rl 'mark\.gpu' tests --include='*.py')
gpu:  ## On a GPU machine, offline: build with its own Python, run the GPU tests and benchmarks.
	@$(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null \
	  || { echo "make gpu: $(PYTHON) has no torch that sees a GPU"; exit 1; }
	@$(PYTHON) -c 'import pytest' 2>/dev/null || { echo "make gpu: $(PYTHON) has no pytest"; exit 1; }
	@DSKERNELS_BUILD=cuda $(PYTHON) setup.py -q build_ext --inplace
	@status=0; export PYTHONPATH=.:python; \
	  $(PYTHON) -m pytest -o addopts="-ra --import-mode=importlib --strict-markers" -m gpu $(gpu_tests) $(ARGS) || status=1; \
	  $(PYTHON) -m benchmarks --device cuda || status=1; \
	  exit $$status

clean:  ## Remove what was built; the environment stays.
	@rm -rf build dist *.egg-info dskernels/_C.*.so $(VENV)/built

$(VENV)/ready:
	@echo "Making $(VENV) with $(TORCH): the first time takes some minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(pip) -qq "$(TORCH)" "setuptools>=77.0.3" "cmake>=3.18" ninja
	@touch $@

# pip hides what setup.py prints, so the line about parts that were not built is fetched from the log.
$(VENV)/built: $(VENV)/ready $(sources)
	@echo "Building dskernels into $(VENV)"
	@$(pip) -v --no-build-isolation -e ".[test,lint]" >$(VENV)/build.log 2>&1 || { tail -n 40 $(VENV)/build.log; exit 1; }
	@sed -n 's/^ *\(dskernels: .*\)/\1/p' $(VENV)/build.log
	@touch $@
