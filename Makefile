# make demo    a model that learns sums on this machine, from nothing
# make test    everything: lint, types, imports, unit tests, and a real Slurm where root can have one
# make bench   the measurements of docs/benchmarks.md

PYTHON ?= python3
# pip's default build. For a build without CUDA from another index: make demo TORCH="torch --index-url ..."
TORCH ?= torch==2.13.0
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export WANDB_MODE ?= offline

.PHONY: demo test lint bench clean

demo: .venv/train
	$(BIN)/python -m tests.demo

test: .venv/test
	.ci/install-slurm
	$(MAKE) --no-print-directory lint
	$(BIN)/python -m pytest

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/test
	$(BIN)/pip install --quiet --no-deps --requirement benchmarks/requirements.txt
	$(BIN)/python -m benchmarks.sft
	$(BIN)/python -m benchmarks.loss_memory
	$(BIN)/python -m benchmarks.scaling

clean:
	rm -rf .venv demo

# torch comes first: what depends on it is then content with this build.
.venv/train: setup.cfg
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable '.[train]'
	touch $@

.venv/test: .venv/train
	$(BIN)/pip install --quiet --editable '.[train,test]'
	touch $@
