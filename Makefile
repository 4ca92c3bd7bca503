# Everything a newcomer needs: `make demo` answers a prompt through two pools, `make run` keeps serving, `make test` checks.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A slow or busy package index is asked again before anything fails.
export PIP_RETRIES ?= 10
export PIP_DEFAULT_TIMEOUT ?= 60
# The second lane of `make test`, half of the time of what needs no real processes.
LANE_TESTS := tests/engine tests/benchmarks
LANE_LOG := $(VENV)/lane-tests.log
PROMPT ?= Explain in two sentences why the sky is blue.
NATIVE_SOURCES := $(wildcard engine/native/*.cpp engine/native/*.h engine/native/kernels/* kv_transfer/native/*.cpp)
PROTO_FILES := $(wildcard proto/tandem/v1/*.proto)

.PHONY: help run demo test lint format proto lock bench sweep model clean

help:  ## show this help
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run-stamp: requirements/run.lock pyproject.toml setup.py | $(BIN)/python
	@echo "installing into $(VENV), PyTorch's CPU build among it: a few minutes the first time"
	$(BIN)/python -m pip install --disable-pip-version-check -q -r requirements/run.lock
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps -e .
	@touch $@

# The install built these too; sources that came since, with a `git pull`, make the libraries stale.
$(VENV)/.native-stamp: $(NATIVE_SOURCES) $(VENV)/.run-stamp
	$(BIN)/python -m engine.native.build && $(BIN)/python -m kv_transfer.native.build \
	  || echo "a native library could not be built: what stands in for it is slower, and tandem serve says so"
	@touch $@

$(VENV)/.dev-stamp: requirements/dev.lock requirements/transports.lock $(VENV)/.run-stamp
	$(BIN)/python -m pip install --disable-pip-version-check -q -r requirements/dev.lock
	@# Without dependencies: nixl asks for torch, and shall not bring a CUDA build; not every machine has wheels of these.
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps -r requirements/transports.lock \
	  || echo "ucx and nixl could not be installed: tests of these transports are skipped, and say so"
	@touch $@

model: $(VENV)/.native-stamp  ## fetch the default model (93 MB, checked) into the local cache
	$(BIN)/tandem model fetch

run: model  ## start the default cluster, stream an answer, keep serving until Ctrl-C
	$(BIN)/tandem serve --ask "$(PROMPT)"

demo: model  ## answer one prompt through a prefill and a decode process, print its timeline, stop
	$(BIN)/tandem generate --start --timeline "$(PROMPT)"

test: model $(VENV)/.dev-stamp  ## run the whole suite
	@# Two lanes, for two cores: what the second one said is shown when the first is done. Every part runs, whatever failed
	@# before it: who reads the log shall not have to ask again for the rest.
	@# UCX's and NIXL's libraries do not share a process with each other, nor with everything else.
	@# Real processes share this machine with whatever else runs on it. Which of their tests failed is said, and these few
	@# are run once more, by a new interpreter and with new clusters; a second failure is one. Other tests have one attempt.
	@$(BIN)/python -m pytest $(LANE_TESTS) -m "not cluster" > $(LANE_LOG) 2>&1 & lane=$$!; \
	trap 'kill $$lane 2>/dev/null || true' EXIT; failed=0; \
	part() { $(BIN)/python -m pytest "$$@" || failed=1; }; \
	part -m "not cluster" --ignore=tests/kv_transfer $(LANE_TESTS:%=--ignore=%); \
	part tests/kv_transfer -k "not nixl"; \
	part tests/kv_transfer -k nixl; \
	wait $$lane || failed=1; cat $(LANE_LOG); \
	$(BIN)/python -m pytest -m cluster || { \
	  test $$? -eq 1 \
	  && echo "SECOND AND LAST ATTEMPT of the tests of real processes that failed above" \
	  && $(BIN)/python -m pytest -m cluster --last-failed --last-failed-no-failures none -rap \
	  && echo "FLAKY: the tests that passed just now failed at their first attempt, see above"; } || failed=1; \
	test $$failed -eq 0 || { echo "make test: something failed, see above"; exit 1; }

lint: $(VENV)/.dev-stamp  ## ruff, mypy, import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev-stamp  ## rewrite what ruff can rewrite
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(VENV)/.dev-stamp  ## regenerate the stubs in proto/tandem/v1
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto --grpc_python_out=proto \
	  --mypy_out=quiet:proto --mypy_grpc_out=quiet:proto $(PROTO_FILES)

bench: model $(VENV)/.dev-stamp  ## first measurements on this machine, written to bench-out/
	$(BIN)/python -m benchmarks.first_measurement --out bench-out

sweep: model $(VENV)/.dev-stamp  ## how much this machine holds, by pool and together: 20 minutes at most, kept in docs/sweep-cpu/
	$(BIN)/tandem bench sweep --out sweep-out --quick --input-tokens 64:192 --output-tokens 16:48
	$(BIN)/tandem simulate sweep-out --out sweep-out --splits 6
	$(BIN)/tandem bench report sweep-out --export docs/sweep-cpu

lock: | $(BIN)/python  ## rewrite requirements/*.lock from pyproject.toml
	$(BIN)/python -m pip install -q pip-tools
	for lock in run dev; do \
	  if [ $$lock = dev ]; then extras="--extra dev --extra bench -c requirements/run.lock"; else extras=; fi; \
	  $(BIN)/pip-compile -q --strip-extras --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-annotate \
	    --allow-unsafe --no-header $$extras -o requirements/$$lock.lock pyproject.toml requirements/torch.in; \
	  sed -i 's/^torch==\([0-9.]*\)+cpu/torch==\1/' requirements/$$lock.lock; \
	done
	$(BIN)/pip-compile -q --strip-extras --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-annotate \
	  --no-header --extra ucx --extra nixl -c requirements/run.lock -o requirements/transports.lock pyproject.toml requirements/torch.in
	grep -v -e '^torch==' -e '^#' requirements/transports.lock | grep -vxFf requirements/run.lock > requirements/transports.only
	mv requirements/transports.only requirements/transports.lock

clean:  ## remove the environment and everything built or measured
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis bench-out sweep-out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
