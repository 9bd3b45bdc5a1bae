# Everything a person or CI runs. The environment is .venv; it is made once, and again when pyproject.toml or
# constraints.txt or the native sources change. A different interpreter: make demo PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt
DEMO_PROMPT ?= def __eq__(self, other):
SUITE ?= tests
NATIVE := $(wildcard src/writehead/kernels/cpu/native/*)

.PHONY: demo test check format proof box clean help
.DELETE_ON_ERROR:

help:
	@echo "make demo     install writehead here and complete a function with the model in the box"
	@echo "make test     install the test extras and run the whole suite (one part: SUITE=tests/unit)"
	@echo "make check    format, lint, types and layers, as CI runs them"
	@echo "make format   rewrite the sources in the house format"
	@echo "make proof    the slow proofs in tests/slow (minutes)"
	@echo "make box      train the model in the box again (two hours; after a break: BOX_FLAGS=--resume)"
	@echo "make clean    remove the environment, caches and builds"

demo: $(VENV)/.installed
	$(BIN)/writehead generate --stats "$(DEMO_PROMPT)"

# The real checkpoint is fetched first, outside any test's time limit; without a network its tests fail and say so.
test: $(VENV)/.installed-dev
	-$(BIN)/python -m tests.smollm2
	$(BIN)/python -m pytest $(SUITE)

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(VENV)/.installed-dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

proof: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --timeout=0 tests/slow

box: $(VENV)/.installed
	$(BIN)/writehead train --out runs/box --publish src/writehead/box $(BOX_FLAGS)

clean:
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed: pyproject.toml constraints.txt $(NATIVE) | $(BIN)/python
	@echo "Installing writehead into $(VENV) (torch is large: minutes on the first run)"
	$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt $(NATIVE) | $(BIN)/python
	@echo "Installing writehead with its test and development extras into $(VENV) (minutes on the first run)"
	$(PIP_INSTALL) --editable ".[dev]"
	@touch $@ $(VENV)/.installed

$(BIN)/python:
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "There is no $(PYTHON) on this machine: install Python 3.11, 3.12 or 3.13, or name one with make PYTHON=/path/to/python." >&2; \
	  exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "writehead needs Python 3.11, 3.12 or 3.13 and $(PYTHON) is $$("$(PYTHON)" -V 2>&1): name another with make PYTHON=/path/to/python." >&2; \
	  exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments (no ensurepip): install the package python3-venv (Debian, Ubuntu), or name another with make PYTHON=/path/to/python." >&2; \
	  exit 1; }
	"$(PYTHON)" -m venv $(VENV)
