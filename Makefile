# make setup | demo | test | lint | clean   (variables: scripts/setup.sh, and those below)
VENV ?= .venv
NPROC ?= 3
OUTPUT_DIR ?= runs/demo
# Two workers: many tests wait for processes that they start. A file stays on one worker; without
# restarts, a worker that crashes ends the run (xdist hangs after one that owns a group). Files go
# in the order of their names: xdist's own order leaves the longest to the end.
PYTEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
BIN := $(abspath $(VENV))/bin

# Three ranks share two cores: one thread per rank is fastest.
export OMP_NUM_THREADS ?= 1
export VENV OTHER_MEGATRON
# Every role and many tests start processes that import torch, Megatron and vLLM. Without bytecode
# files, each of them would compile these packages again (10 s).
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-other-megatron lint format clean

setup:
	@bash scripts/setup.sh

demo:
	@start=$$(date +%s); \
	bash scripts/setup.sh || exit 1; \
	ready=$$(date +%s); \
	PATH="$(BIN):$$PATH" MEGATRON_RL_SETUP_SECONDS=$$((ready - start)) \
	  torchrun --nproc-per-node $(NPROC) examples/scalerl_tiny.sh \
	  --output_dir $(OUTPUT_DIR); \
	status=$$?; end=$$(date +%s); \
	echo "make demo: set-up $$((ready - start)) s + run $$((end - ready)) s = $$((end - start)) s"; \
	exit $$status

test: setup
	PATH="$(BIN):$$PATH" bash scripts/run_tests.sh $(PYTEST_ARGS)

# Trainer tests with another supported release: make test-other-megatron OTHER_MEGATRON=0.18.2
test-other-megatron: setup
	PYTHONPATH="$(abspath $(VENV)-megatron-$(OTHER_MEGATRON))" PATH="$(BIN):$$PATH" \
	  python -m pytest -m "not gpu" $(PYTEST_ARGS) tests/trainer tests/compat tests/megatron_plugin

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VENV)-torch-* $(VENV)-megatron-* .bootstrap build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
