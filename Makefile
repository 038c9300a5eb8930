# make demo and make test are all that a fresh clone needs: both install what is missing first.
# Needed on the machine: Python >= 3.11 with pip, and make.
#
#   PYTHON=...      the interpreter for .venv, if the first suitable one is not the one you want
#   ARGS=...        passed on: make test ARGS="tests/pure -k slots", make demo ARGS="--json"
#   TORCH_ARGS=...  passed to the pip call that installs torch: the index of another build, say

VENV := .venv
BIN := $(VENV)/bin
RUN := $(VENV)/.stamp-run
DEV := $(VENV)/.stamp-dev
PEERS_VENV := .venv-peers
PEERS := $(PEERS_VENV)/.stamp
ENGINES := .venv-peers-engine
ENGINE_STAMPS := $(foreach name,openvino llama vllm,$(ENGINES)/.stamp-$(name))
NATIVE := $(PEERS_VENV)/.stamp-native
# The mutants replace functions, which compiled code does not notice.
NATIVE_TESTS := $(filter-out %_mutants.py,$(wildcard $(addprefix tests/pure/test_,cache_*.py columns.py \
  docs.py engine_core.py eviction_queue.py hash_index.py page*.py pin_machine.py planner*.py polic*.py \
  prefix_cache.py public_prefixes.py sequence_*.py single_flight.py))) tests/cpu/test_bit_identity.py
SPEC := pyproject.toml constraints.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
ARGS ?=
TORCH_ARGS ?=

# A stamp holds the folder it was made in. In a checkout that was moved or copied, the scripts and the
# editable install of .venv point elsewhere: everything is installed again.
ifneq ($(shell cat $(RUN) 2>/dev/null),$(CURDIR))
$(RUN): FORCE
endif
ifneq ($(shell cat $(PEERS) 2>/dev/null),$(CURDIR))
$(PEERS): FORCE
endif

# The first interpreter that is new enough and can make an environment. Debian's has no ensurepip unless
# python3-venv is installed; its pip can fill an empty environment as well.
define MAKE_VENV
if $(BIN)/python -m pip --version >/dev/null 2>&1 && grep -qsF "$(CURDIR)/$(VENV)" $(BIN)/activate; then \
  echo "[1/3] $(VENV) is there: $$($(BIN)/python --version)"; exit 0; \
fi; \
for py in $(or $(PYTHON),python3.11 python3.12 python3.13 python3); do \
  "$$py" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || continue; \
  if "$$py" -c 'import ensurepip' >/dev/null 2>&1; then \
    echo "[1/3] creating $(VENV) with $$("$$py" --version)"; \
    exec "$$py" -m venv --clear $(VENV); \
  fi; \
  if "$$py" -m pip --version >/dev/null 2>&1; then \
    echo "[1/3] creating $(VENV) with $$("$$py" --version), without ensurepip"; \
    "$$py" -m venv --clear --without-pip $(VENV) && \
    exec "$$py" -m pip --disable-pip-version-check --python $(VENV) install pip; \
    exit 1; \
  fi; \
done; \
echo "error: tried $(or $(PYTHON),python3.11 python3.12 python3.13 python3) and found no Python >= 3.11 with pip." >&2; \
echo "  Install one (on Debian: python3 python3-venv python3-pip), or name one: make PYTHON=/path/to/python3" >&2; \
exit 1
endef

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-pure check format bench bench-attention bench-core bench-engine bench-decode perf soak-core soak-engine accuracy bench-step cover-core gpu-check native test-native clean FORCE

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | while IFS="$$(printf '\t')" read -r name text; do \
	  printf '  make %-15s %s\n' "$$name" "$$text"; done

venv: $(DEV)  ## .venv with everything for working on Ramify
	@echo "$(VENV) is ready"

demo: $(RUN)  ## 32 questions about one document: cache off, cold, warm
	@$(BIN)/ramify demo $(ARGS)

test: $(DEV)  ## the test suite, one process for each core
	@$(BIN)/python -m pytest -n auto --dist loadfile $(ARGS)

test-pure: $(DEV)  ## the tests that need no torch: seconds
	@$(BIN)/python -m pytest tests/pure $(ARGS)

check: $(DEV)  ## lint, format, types, import contracts
	@echo "ruff check" && $(BIN)/ruff check
	@echo "ruff format --check" && $(BIN)/ruff format --check
	@echo "mypy" && $(BIN)/mypy
	@echo "lint-imports" && $(BIN)/lint-imports --no-logo

format: $(DEV)  ## rewrite what ruff can
	@$(BIN)/ruff check --fix --exit-zero
	@$(BIN)/ruff format

bench: $(DEV)  ## Ramify against Hugging Face generate on shared prefixes
	@$(BIN)/python benchmarks/shared_prefix.py $(ARGS)

bench-attention: $(DEV)  ## one layer of attention on CPU beside torch's own kernels
	@$(BIN)/python benchmarks/attention.py $(ARGS)

bench-core: $(PEERS) $(NATIVE)  ## the cache core against those of other engines
	@PYTHONPATH=src $(PEERS_VENV)/bin/python benchmarks/cache_core.py $(ARGS)

bench-engine: $(DEV) $(ENGINE_STAMPS)  ## whole engines side by side, on shared and unshared prompts
	@$(BIN)/python benchmarks/engine.py $(ARGS)

bench-decode: $(DEV)  ## one request's decode beside what reading weights and K/V takes, in turns
	@$(BIN)/python benchmarks/decode_bound.py $(ARGS)

perf: $(DEV)  ## this tree beside the stored baseline; fails when it is slower
	@$(BIN)/python benchmarks/perf.py $(ARGS)

soak-core: $(DEV)  ## a million random operations on the cache core, checked after each
	@PYTHONPATH=. $(BIN)/python scripts/soak_core.py $(ARGS)

soak-engine: $(DEV)  ## 20,000 random requests on a tiny model: faults, forks, aborts, tiny pools; bit for bit
	@PYTHONPATH=. $(BIN)/python scripts/soak_engine.py $(ARGS)

accuracy: $(DEV)  ## 200 questions with known answers to a running server, cache off and on
	@PYTHONPATH=. $(BIN)/python scripts/accuracy.py $(ARGS)

bench-step: $(DEV)  ## what a step costs in Python, by running and waiting requests
	@PYTHONPATH=src:. $(BIN)/python benchmarks/step_overhead.py $(ARGS)

cover-core: $(DEV)  ## branch coverage of the cache core by its tests; below 100 % is an error
	@$(BIN)/python -m coverage run --branch --source=src/ramify/cache -m pytest tests/pure -q -k "not mutants and not machine and not engine and not test_cache_life" $(ARGS)
	@$(BIN)/python -m coverage report --show-missing --fail-under=100

gpu-check: $(DEV)  ## the GPU tier and its figures; without a GPU, its kernels in an interpreter
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	  $(BIN)/python -m pytest tests/gpu && \
	  PYTHONPATH=src $(BIN)/python benchmarks/gpu_attention.py --json gpu-attention.json $(ARGS); \
	else \
	  echo "no CUDA device: the kernels run in Triton's interpreter instead"; \
	  $(BIN)/python -m pytest tests/pure/test_tiles.py tests/cpu/test_triton.py tests/cpu/test_parity_grid.py \
	    tests/cpu/test_triton_compiles.py; \
	fi

native: $(RUN)  ## a wheel in dist/, the cache core compiled with mypyc (C compiler)
	@$(PIP) wheel --no-deps -w dist .

test-native: $(DEV)  ## the tests of the cache, with its core compiled
	@rm -rf build/native && mkdir -p build
	@$(PIP) wheel -v --no-deps -w build/native . >build/native.log 2>&1 || { cat build/native.log; exit 1; }
	@$(BIN)/python -m zipfile -e build/native/*.whl build/native/site
	@if ! { command -v cc || command -v gcc || command -v clang; } >/dev/null; then echo "no C compiler: nothing to test"; exit 0; fi; \
	ls build/native/site/ramify/cache/tree.*.so || { tail -n 40 build/native.log; exit 1; }; \
	PYTHONPATH=build/native/site $(BIN)/python -m pytest -n auto --dist loadfile $(NATIVE_TESTS) $(ARGS)

clean:  ## remove .venv, caches and builds
	rm -rf $(VENV) $(PEERS_VENV) $(ENGINES) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests scripts benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps are removed first and written last: an interrupted install leaves none.
$(RUN): $(SPEC)
	@rm -f $(RUN) $(DEV)
	@$(MAKE_VENV)
	@echo "[2/3] installing $(TORCH) (the largest part: 0.2 to 3 GB, depending on the build)"
	@$(PIP) install -c constraints.txt $(TORCH_ARGS) $(TORCH)
	@echo "[3/3] installing ramify"
	@$(PIP) install -c constraints.txt -e ".[cpu]"
	@printf '%s\n' "$(CURDIR)" > $(RUN)

$(DEV): $(RUN) $(SPEC)
	@rm -f $(DEV)
	@echo "[dev] installing what tests and checks need"
	@$(PIP) install -c constraints.txt -e ".[dev]"
	@touch $(DEV)

# Other engines' cache cores, apart from what Ramify itself needs. Only numpy must be had: whatever
# else cannot be installed leaves its peers absent, and the benchmark's table says why.
$(PEERS): VENV := $(PEERS_VENV)
$(PEERS): BIN := $(PEERS_VENV)/bin
$(PEERS): PIP = $(BIN)/python -m pip --disable-pip-version-check --no-input
$(PEERS): $(SPEC) benchmarks/peers.txt benchmarks/core/fetch.py
	@rm -f $(PEERS)
	@$(MAKE_VENV)
	@echo "[2/3] installing numpy, $(TORCH) and what the peers import"
	@$(PIP) install -c constraints.txt numpy
	@$(PIP) install -c constraints.txt $(TORCH_ARGS) $(TORCH) || echo "no torch: its peers will be absent"
	@$(PIP) install -c constraints.txt -r benchmarks/peers.txt || echo "some peers will be absent"
	@echo "[3/3] unpacking the peers' wheels"
	@$(BIN)/python benchmarks/core/fetch.py $(PEERS_VENV)/peers
	@printf '%s\n' "$(CURDIR)" > $(PEERS)

# Other engines, each in an environment of its own. What cannot be had leaves a note, and the
# benchmark's table repeats it.
$(ENGINES)/.stamp-%: benchmarks/engines/install.py | $(DEV)
	@echo "[peers] $*: minutes, and gigabytes for vllm"
	@TORCH="$(TORCH)" $(BIN)/python benchmarks/engines/install.py $* $(ENGINES)
	@touch $@

# Our own core as a wheel has it, compiled; without a C compiler its rows are absent.
$(NATIVE): $(PEERS) hatch_build.py $(wildcard src/ramify/cache/*.py)
	@echo "compiling the cache core: a minute or so"
	@rm -rf build/native $(PEERS_VENV)/peers/ramify-native
	@$(PEERS_VENV)/bin/python -m pip --disable-pip-version-check --no-input -q wheel --no-deps -w build/native . \
	  && $(PEERS_VENV)/bin/python -m zipfile -e build/native/*.whl $(PEERS_VENV)/peers/ramify-native \
	  && touch $(NATIVE) || echo "no wheel: the rows of the compiled core will be absent"
	@rm -rf build/native
