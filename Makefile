# Everything runs in the virtual environment .venv, which is updated when pyproject.toml changes.
# Use another one for another Python: make run PYTHON=python3.13 VENV=.venv-3.13
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist worksteal

.PHONY: help run test quick lint exhaustive interop real-model cuda bench docs docs-examples docs-test pictures package-test clean

run: $(VENV)/.stamp-plots  ## train a small model in float32 and FP8, convert it, print the losses: about 3 minutes
	$(BIN)/python experiments/demo.py $(ARGS)

help:  ## print these lines
	@sed -n 's/^\([a-z-]*\):.*  ## /\1: /p' $(MAKEFILE_LIST)

# In two parts, because XLA's options hold for a whole process: see tests/conftest.py. 5: no test.
test: $(VENV)/.stamp-dev  ## the test suite on every core, without exhaustive tests and documentation: about 11 minutes
	@status=0; for part in guarded models; do \
	  $(PYTEST) --part $$part $(ARGS) || [ $$? = 5 ] || status=1; \
	done; exit $$status

quick: $(VENV)/.stamp-dev  ## a part of the test suite: about 5 minutes
	$(PYTEST) -m "quick and not exhaustive" $(ARGS)

lint: $(VENV)/.stamp-dev  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# MODES=all compares with a C program in all modes and saturations. It needs a C compiler, takes under an hour,
# continues after an interrupt, and writes experiments/RESULTS.md.
exhaustive: $(VENV)/.stamp-dev  ## the tests that `make test` skips: all cases, every float32 number
ifeq ($(MODES),all)
	$(BIN)/python experiments/benchmarks/every_float32.py $(ARGS)
	$(BIN)/python experiments/benchmarks/results.py
else
	$(PYTEST) -m exhaustive $(ARGS)
endif

# Loaders of converted checkpoints: torch, transformers, compressed-tensors, in an environment of
# their own, because they are large. A missing package is a failure, but for those that wrote other
# layouts, which are not installed: see tests/interop/test_foreign_packages.py. Warnings are not ours.
interop:  ## load converted checkpoints with the packages that they are written for
	$(MAKE) .venv-interop/.stamp-interop VENV=.venv-interop
	.venv-interop/bin/python -m pytest tests/interop -W default $(ARGS)

real-model:  ## convert a small language model to FP8 and int4; perplexity and text before and after
	$(MAKE) .venv-interop/.stamp-interop VENV=.venv-interop
	.venv-interop/bin/python experiments/convert_model.py $(ARGS)

# No GPU is needed: XLA compiles for a description of one.
cuda:  ## compile matmuls and models for an NVIDIA GPU
	$(MAKE) .venv-cuda/.stamp-cuda VENV=.venv-cuda
	.venv-cuda/bin/python -m pytest tests/cuda -W default $(ARGS)

BENCHMARKS := import_time training optim casts scales operators conversion gpu gpu_training
# Results of a trial are stored elsewhere.
RESULTS := $(if $(filter --quick,$(ARGS)),build/quick,experiments)

bench: $(VENV)/.stamp-bench  ## measure times and ratios; run nothing else meanwhile; ARGS=--quick for a trial
	for name in $(BENCHMARKS); do \
	  $(BIN)/python experiments/benchmarks/$$name.py --results $(RESULTS)/results $(ARGS) || exit; \
	done
	$(BIN)/python experiments/benchmarks/results.py --results $(RESULTS)/results
	$(if $(filter --quick,$(ARGS)),,$(BIN)/python experiments/readme_figures.py)

docs: $(VENV)/.stamp-docs  ## build the site in build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --config-file docs/mkdocs.yml

docs-examples: $(VENV)/.stamp-dev  ## run what the documentation shows: examples, notebooks, pictures
	$(PYTEST) -m "docs and not exhaustive" \
	  tests/docs tests/notebooks tests/optim/test_examples.py tests/test_readme.py $(ARGS)

# A browser: `apt-get install chromium`, or CHROMIUM=/path/to/one in the environment.
docs-test: docs $(VENV)/.stamp-docs-test  ## test the site in a browser: numbers, keys and layout of the explorer
	$(BIN)/python -m pytest -m browser tests/docs $(ARGS)

pictures: $(VENV)/.stamp-docs  ## draw the pictures of the documentation and of README.md
	$(BIN)/python docs/pictures.py

package-test: $(VENV)/.stamp-dev  ## install wheel and sdist in empty environments and try them
	$(BIN)/python -m pytest -m package tests/test_package.py $(ARGS)

$(VENV)/.stamp-%: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	touch $@

clean:
	rm -rf $(VENV) .venv-interop .venv-cuda build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
