# Everything runs in a virtual environment of its own, brought up to date when pyproject.toml changes.
# Another Python takes another one: make run PYTHON=python3.13 VENV=.venv-3.13
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: help run test quick lint exhaustive interop cuda bench docs docs-examples docs-test pictures package-test clean

run: $(VENV)/.stamp-plots  ## train, convert, evaluate; ends with a table
	$(BIN)/qtoolkit demo $(ARGS)

help:  ## these lines
	@sed -n 's/^\([a-z-]*\):.*  ## /\1: /p' $(MAKEFILE_LIST)

test: $(VENV)/.stamp-dev  ## the suite, on every core; not what is exhaustive or runs documentation
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal $(ARGS)

quick: $(VENV)/.stamp-dev  ## a quick part of it
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal -m "quick and not exhaustive" $(ARGS)

lint: $(VENV)/.stamp-dev  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# MODES=all compares with a C oracle in all modes and saturations: needs a C compiler, takes under an hour,
# goes on where it was interrupted, and writes experiments/RESULTS.md.
exhaustive: $(VENV)/.stamp-dev  ## what `make test` leaves out: all cases, every float32 input
ifeq ($(MODES),all)
	$(BIN)/python experiments/benchmarks/every_float32.py $(ARGS)
	$(BIN)/python experiments/benchmarks/results.py
else
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal -m exhaustive $(ARGS)
endif

# Loaders of converted checkpoints: torch, transformers, compressed-tensors, in an environment of
# their own, because they are large. A missing package is a failure. Their warnings are not ours.
interop:  ## what convert writes, loaded by the packages it is written for
	$(MAKE) .venv-interop/.stamp-interop VENV=.venv-interop
	.venv-interop/bin/python -m pytest tests/interop -W default $(ARGS)

# No GPU is needed: they are compiled for one that is described.
cuda:  ## products and models, compiled by XLA for an NVIDIA GPU
	$(MAKE) .venv-cuda/.stamp-cuda VENV=.venv-cuda
	.venv-cuda/bin/python -m pytest tests/cuda -W default $(ARGS)

BENCHMARKS := import_time training optim casts scales operators conversion gpu gpu_training
# Quick results are kept apart from those that count.
RESULTS := $(if $(filter --quick,$(ARGS)),build/quick,experiments)

bench: $(VENV)/.stamp-bench  ## medians and ratios; nothing else should run; ARGS=--quick tries it out
	for name in $(BENCHMARKS); do \
	  $(BIN)/python experiments/benchmarks/$$name.py --results $(RESULTS)/results $(ARGS) || exit; \
	done
	$(BIN)/python experiments/benchmarks/results.py --results $(RESULTS)/results
	$(if $(filter --quick,$(ARGS)),,$(BIN)/python experiments/readme_figures.py)

docs: $(VENV)/.stamp-docs  ## the documentation site, into build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --config-file docs/mkdocs.yml

docs-examples: $(VENV)/.stamp-dev  ## what the documentation shows: examples, notebooks, pictures
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal -m "docs and not exhaustive" \
	  tests/docs tests/notebooks tests/optim/test_examples.py tests/test_readme.py $(ARGS)

# A browser: `apt-get install chromium`, or CHROMIUM=/path/to/one in the environment.
docs-test: docs $(VENV)/.stamp-docs-test  ## the site in a browser: the explorer's numbers, keys, layout
	$(BIN)/python -m pytest -m browser tests/docs $(ARGS)

pictures: $(VENV)/.stamp-docs  ## the pictures of the documentation and of README.md
	$(BIN)/python docs/pictures.py

package-test: $(VENV)/.stamp-dev  ## wheel and sdist, each installed and tried in an empty environment
	$(BIN)/python -m pytest -m package tests/test_package.py $(ARGS)

$(VENV)/.stamp-%: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	touch $@

clean:
	rm -rf $(VENV) .venv-interop .venv-cuda build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
