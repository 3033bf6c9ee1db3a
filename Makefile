# `make demo` and `make test` set up everything but the packages that README names; `make` lists the targets.
# After `make clean`:
#
#   make venv PYTHON=python3.12           another Python
#   CMAKE_ARGS=-DGGML_CUDA=on make venv   another build of llama.cpp

PYTHON ?= python3
TIME   ?= 300
KILLS  ?= 200
BIN    := .venv/bin
SHIM   := $(wildcard native/*) setup.py

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all mutations llama-server lint docs integrations upstream fuzz soak bench gpu clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

venv: .venv/.installed ## set up .venv: tools, the pinned llama-cpp-python, this package with its shim

demo: venv ## conversations with a hybrid model of 100M parameters, stock and ours side by side
	$(BIN)/llamahybrid tiny qwen35 .venv/demo.gguf --params 100M
	$(BIN)/llamahybrid bench .venv/demo.gguf --on stock --on ours --clients 1 --rounds 1; \
	status=$$?; rm -f .venv/demo.gguf; exit $$status

PYTEST := $(BIN)/pytest -n 2 --dist loadgroup
BUILD  := LLAMAHYBRID_ENGINE=stock $(BIN)/llamahybrid engine build
ON     := LLAMAHYBRID_ENGINE="$$lib" LLAMAHYBRID_TEST_LIB="$$lib" $(PYTEST)

test: lint ## lint, types, the suite on the stock engine, and its native part on the patched one
	LLAMAHYBRID_ENGINE=stock $(PYTEST)
	lib=$$($(BUILD)) && $(ON) -m "patched and not full"

test-all: lint llama-server ## everything: all architectures, long campaigns, llama-server, the hardening patches
	LLAMAHYBRID_ENGINE=stock $(PYTEST) -m ""
	lib=$$($(BUILD)) && $(ON) -m patched
	lib=$$($(BUILD) --hardening) && $(ON) -m "" tests/patches tests/harness/hazards tests/devices tests/test_pytest_plugin.py

mutations: venv ## plant faults in copies of the package, one at a time, and name the test that fails
	LLAMAHYBRID_ENGINE=stock $(BIN)/python -m tests.lab.mutations --workers 2

llama-server: venv ## llama-server of the pinned source, stock and patched
	LLAMAHYBRID_ENGINE=stock $(BIN)/python -m tests.lab.server_build

lint: venv ## ruff, mypy, line lengths; hints on wording and subjects
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.lab.habits

docs: venv ## write the measured tables of README and docs, and the page of public names
	$(BIN)/python docs/api_page.py
	$(BIN)/python -m benchmarks.figures

integrations: venv ## LangChain, llama-index, outlines, ... each in an environment of its own (ONLY="guidance llm": these)
	$(BIN)/python -m tests.integrations.environments $(ONLY)

upstream: venv ## look for a newer llama-cpp-python, and merge the patches into it, without writing them
	$(BIN)/python -m tests.lab.rebase latest --check

fuzz: venv ## campaigns of TIME seconds each: random histories, parallel requests, interrupts, damaged state, drafts; KILLS killed writers
	$(BIN)/python -m tests.lab.fuzz --seconds $(TIME)
	$(BIN)/python -m tests.lab.parallel_fuzz --seconds $(TIME)
	$(BIN)/python -m tests.lab.interrupt_fuzz --seconds $(TIME)
	$(BIN)/python -m tests.lab.signal_fuzz --seconds $(TIME)
	$(BIN)/python -m tests.lab.blob_fuzz --seconds $(TIME)
	@if LLAMAHYBRID_ENGINE=patched $(BIN)/python -c "import llamahybrid, llama_cpp" 2>/dev/null; then \
		LLAMAHYBRID_ENGINE=patched $(BIN)/python -m tests.lab.rpc tests.lab.fuzz --seconds $(TIME) && \
		LLAMAHYBRID_ENGINE=patched $(BIN)/python -m tests.lab.blob_fuzz --way native --seconds $(TIME); \
	else echo "damaged state straight at the C API: left out, no patched engine that was built matches"; fi
	$(BIN)/pytest -q -m hypothesis --hypothesis-profile=random
	$(BIN)/python -m tests.lab.disk_fuzz --kills $(KILLS) --seconds 60
	$(BIN)/python -m tests.lab.remote_fuzz --blows 50
	$(BIN)/python -m tests.lab.draft_fuzz --seconds $(TIME)

soak: venv ## memory of long-lived models (TIME seconds); a server under load, hung up on and killed
	$(BIN)/python -m tests.lab.fuzz --way one-life --arch qwen35 --arch mamba --arch gemma3 --seconds $(TIME)
	$(BIN)/python -m tests.lab.server_load

bench: venv ## one client beside stock, and the gain of drafts
	$(BIN)/python -m benchmarks.clients alone drafts

gpu: venv ## with all layers on the GPU: hazards, campaigns, speed; benchmarks/results/gpu-*.json (skipped without a GPU)
	$(BIN)/python -m benchmarks.gpu --seconds $(TIME)

clean: ## remove what the other targets made here (the cache folder keeps the built wheel)
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f llamahybrid/_shim.* native/_shim.*

.venv/.created:
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet "platformdirs>=4" "filelock>=3.25"
	touch $@

# Each stamp is newer than all it was made from, so a second run does nothing. pip's cache of built wheels does not
# know CMAKE_ARGS, compiler and CPU, so each build has a cache of its own.
.venv/.engine: .venv/.created llamahybrid/engine/sdist.py
	$(BIN)/python -c "from llamahybrid.engine import sdist; print(sdist.fetch().as_uri())" > .venv/engine.txt
	$(BIN)/python -c "from llamahybrid.engine.recipe import Recipe; print(Recipe.here().pip_cache)" > .venv/cache.txt
	$(BIN)/python -m pip install --no-deps --cache-dir "$$(cat .venv/cache.txt)" \
		"llama-cpp-python @ $$(cat .venv/engine.txt)"
	touch $@

.venv/.installed: .venv/.engine pyproject.toml $(SHIM)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@
