# Every target uses .venv, which `make setup` (and any other target) fills once.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# One thread for each process: the test ranks share the cores.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup demo too-big startup test parity lint format gpu sweep rules golden clean

help:  ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## install autopar and everything its tests need into .venv

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --upgrade pip "setuptools>=77" wheel
	$(BIN)/python -m pip install -qq "torch==2.13.0"
	$(BIN)/python -m pip install -qq --no-build-isolation -e ".[all]"
	touch $(STAMP)

demo: $(STAMP)  ## plan a GPT, train it on 4 ranks, compare with one device, DDP and FSDP2 (< 5 min)
	$(BIN)/python benchmarks/demo.py

too-big: $(STAMP)  ## a model that kills one process under a memory limit trains on 4 ranks
	$(BIN)/python benchmarks/too_big.py

startup: $(STAMP)  ## GPT-2 small: model to plan (< 10 s), plan to first step (< 5 s beyond the step itself)
	$(BIN)/python benchmarks/startup.py

test: $(STAMP)  ## every model, family and world at least once (< 15 min): tests of one process side by side, then ranks
	$(BIN)/python -m pytest -q -n 2 -m "not ranks and not slow and not gpu"; alone=$$?; \
	$(BIN)/python -m pytest -q -m "ranks and not slow and not gpu" && exit $$alone

parity: $(STAMP)  ## the whole parity matrix (< 60 min)
	$(BIN)/python -m pytest -q tests/parity tests/test_benchmarks.py -m "not gpu"

lint: $(STAMP)  ## ruff and strict mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## let ruff lay the code out
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

gpu: $(STAMP)  ## on a host with GPUs: parity, step times and memory, as one report to paste (< 10 min)
	$(BIN)/python benchmarks/gpu.py

sweep: $(STAMP)  ## every architecture of four auto-mappings of transformers, on 2 ranks; writes docs/architectures.md (hours)
	$(BIN)/python benchmarks/hf_sweep.py --jobs 2

rules: $(STAMP)  ## write docs/rules.md anew: op, rule, where it occurs
	$(BIN)/python -m autopar.rules.document > docs/rules.md

golden: $(STAMP)  ## write the golden texts of the tests anew
	$(BIN)/python -m pytest -q tests --update-golden -k golden

clean:  ## remove what was built
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
