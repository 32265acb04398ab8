# The commands of a checkout. Everything is installed into .venv; nothing outside this directory is written.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# PyTorch's CPU wheel index, for where pip does not find PyTorch's CPU build by itself; see the README.
TORCH_INDEX ?=
# The demo: a local model directory instead of the one it builds, where its store lies, tokens of a prompt.
MODEL ?=
STORE ?= .demo/store
PROMPT_TOKENS ?= 4000
# What the demo, the server and the comparison run on: cpu, cuda, or a GPU where there is one and vLLM for it.
DEVICE ?= auto
# What make mutate changes, and for how long.
FILES ?=
MINUTES ?= 30
# Where the comparison, and the demo beside other engines, write: a directory on the drive.
DIR ?=
# Which part of the long tests, as 2/6: all of them without.
SHARD ?=
# Where the server listens.
PORT ?= 8000

BIN := .venv/bin
# So many files of tests at a time, the long ones first. On two cores the third runs while others wait.
AT_A_TIME ?= 3
ON_TWO_CORES = -n $(AT_A_TIME) --dist loadfile --no-loadscope-reorder
ONE_SHARD = $(if $(SHARD),--shard "$(SHARD)")
INSTALL := $(PYTHON) tools/install.py --torch-index "$(TORCH_INDEX)"
# The Python of the environment that install-device made for DEVICE, which has printed all messages already.
ON_DEVICE = "$$($(INSTALL) --device "$(DEVICE)" --where 2>/dev/null)/bin/python"
# Python keeps what it compiles: without, each worker of the tests and each process of theirs compiles all anew.
export PYTHONDONTWRITEBYTECODE :=
# Runs a check; says nothing when it passes and everything when it does not.
quiet = @output=$$($(1) 2>&1) || { printf '%s\n' "$$output"; exit 1; }

# Runs the tests of the CUDA path that are as given; where its environment cannot be had, the installer says so.
on_fake_gpu = @$(INSTALL) --fake-gpu; code=$$?; [ $$code -ne 75 ] || exit 0; [ $$code -eq 0 ] || exit $$code; \
	.venv-cuda/bin/python -m pytest $(ON_TWO_CORES) --timeout 1800 -m "(gpu or fake_gpu) and $(1)" $(2) tests/gpu tests/fake_gpu; \
	code=$$?; [ -z "$(PYTEST_CODE_FILE)" ] || echo $$code >"$(PYTEST_CODE_FILE)"; exit $$code

.PHONY: help install install-device install-dev check test test-cuda test-engines torture torture-cuda test-next mutate demo demo-remote demo-offloading demo-engines compare serve wheel docs clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' Makefile

install: ## install what the demo needs, pinned, into .venv
	@test -n "$(PYTHON)" || { echo "kvdisk: no python3.11 here; name one with PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(INSTALL)

install-device:
	@test -n "$(PYTHON)" || { echo "kvdisk: no python3.11 here; name one with PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(INSTALL) --device "$(DEVICE)"

install-dev: ## install also what the checks and tests need
	@test -n "$(PYTHON)" || { echo "kvdisk: no python3.11 here; name one with PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(INSTALL) --dev

check: install-dev ## format, lint, types and imports
	$(call quiet,$(BIN)/ruff format --check .)
	$(call quiet,$(BIN)/ruff check .)
	$(call quiet,$(BIN)/mypy)
	$(call quiet,$(BIN)/lint-imports)
	@echo "kvdisk: format, lint, types and imports are in order"

test: check ## the checks and every short test that needs no GPU
	@$(BIN)/python -m pytest $(ON_TWO_CORES) --timeout 1800 -m "not gpu and not fake_gpu and not torture"; code=$$?; \
	[ -z "$(PYTEST_CODE_FILE)" ] || echo $$code >"$(PYTEST_CODE_FILE)"; exit $$code

test-cuda: install-dev ## the CUDA path on PyTorch's CUDA build and a fake GPU; downloads 0.8 GB
	$(call on_fake_gpu,not torture)

torture-cuda: install-dev ## the long tests of the CUDA path, in parts with SHARD=1/2
	$(call on_fake_gpu,torture,$(ONE_SHARD))

test-engines: install-dev ## kvdisk behind SGLang's and LMCache's own code, two versions of each; needs 0.6 GB
	@$(INSTALL) --engines; code=$$?; [ $$code -ne 75 ] || exit 0; [ $$code -eq 0 ] || exit $$code; \
	for each in sglang sglang-before; do \
	  PYTHONPATH=.venv-engines/$$each .venv-engines/bin/python -m pytest -n0 --timeout 1800 tests/hicache || exit 1; done; \
	for each in lmcache lmcache-before; do \
	  PYTHONPATH=.venv-engines/$$each .venv-engines/bin/python -m pytest -n0 --timeout 1800 tests/l2adapter || exit 1; done

torture: install-dev ## the long tests, or with SHARD=2/6 the second sixth of them; see docs/TESTING.md
	@$(BIN)/python -m pytest $(ON_TWO_CORES) -m "torture and not fake_gpu" --durations 12 $(ONE_SHARD)

test-next: install-dev ## the scheduler's, hooks' and engine's tests on the other supported vLLM; part of torture
	@$(BIN)/python -m pytest -m torture tests/connector/test_torture_next_vllm.py

mutate: install-dev ## change modules a little and list what no test notices: FILES="kvdisk/manager/pool.py"
	@test -n "$(FILES)" || { echo 'kvdisk: name modules, as FILES="kvdisk/manager/pool.py"' >&2; exit 1; }
	@$(INSTALL) --mutate
	@$(BIN)/python tools/mutate.py --minutes "$(MINUTES)" $(FILES)

demo: install-device ## run the main job on real vLLM: cold, warm from memory, warm from NVMe after a restart
	@$(ON_DEVICE) tools/demo.py --store "$(STORE)" --prompt-tokens "$(PROMPT_TOKENS)" $(if $(MODEL),--model "$(MODEL)")

demo-remote: install-dev ## what one engine computes, another loads from S3, and from a Mooncake Store
	@PYTHONPATH=tests $(BIN)/python tools/demo_remote.py --prompt-tokens "$(PROMPT_TOKENS)"

demo-offloading: install-dev ## behind vLLM's own connector: kvdisk's store beside vLLM's fs tier, with bits flipped
	@$(BIN)/python tools/demo_offloading.py --prompt-tokens "$(PROMPT_TOKENS)"

demo-engines: install-dev ## behind SGLang and LMCache, beside their own file backends; needs 0.6 GB
	@$(INSTALL) --engines
	@$(BIN)/python tools/demo_engines.py $(if $(DIR),--dir "$(DIR)")

compare: install-device ## kvdisk beside vLLM's own offloading, and others where they are installed; DIR=/nvme/somewhere
	@code=0; for each in offloading returning; do \
	  $(ON_DEVICE) tools/compare_$$each.py $(if $(DIR),--dir "$(DIR)") $(if $(MODEL),--model "$(MODEL)") || code=1; \
	done; exit $$code

serve: install-device ## start vLLM's real server with kvdisk, and print what to type to see a hit
	@$(ON_DEVICE) tools/serve.py --store "$(STORE)" --port "$(PORT)" $(if $(MODEL),--model "$(MODEL)")

wheel: install ## build the wheel into dist/, and try it in an empty environment of each Python that is here
	@$(BIN)/python tools/make_wheel.py

docs: ## build the documentation into site/, which opens without a network
	@test -n "$(PYTHON)" || { echo "kvdisk: no python3.11 here; name one with PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(INSTALL) --docs
	$(call quiet,NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict)
	@echo "kvdisk: the documentation is in site/index.html"

clean: ## remove .venv, the site, the demo's files and all caches
	rm -rf .venv .venv-gpu .venv-cuda .venv-engines .demo site build dist kvdisk.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find kvdisk tests tools -name __pycache__ -prune -exec rm -rf {} +
