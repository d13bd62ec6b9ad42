# Every target sets up .venv first; the stamp makes that happen once per change of the dependencies.
VENV   := .venv
BIN    := $(VENV)/bin
PYTHON ?= python3
STAMP  := $(VENV)/.installed

# One more than two cores: many tests wait for processes of their own.
WORKERS ?= 3

# Neighbours stay in one worker as long as all are busy: they share ranks, a browser, and what is computed once a file.
SPREAD := --dist worksteal

# Pass more options with `make test PYTEST_ARGS="-k dtrp -x"`.
PYTEST_ARGS ?=

export OMP_NUM_THREADS ?= 1
# Tests start hundreds of interpreters: each would compile the library anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup demo docs check test faults fuzz lint clean

help:
	@echo "make demo    DTRP, PETRA, LayerPipe and AuxNet beside bp, zb-h1 and pipedream on two processes: one table"
	@echo "make docs    the site, from docs/ into docs/_build/html, which opens without a server"
	@echo "make check   lint and the fast tests: no ranks, no command line, no examples"
	@echo "make test    ruff, mypy, import-linter, pytest: what must pass"
	@echo "make faults  every fault of docs/faults.md, on real processes, and a table of what came of it"
	@echo "make fuzz    bad input by the ten thousand, for a night; FUZZ=20000 cases per test"
	@echo "make lint    ruff, mypy, import-linter only"
	@echo "make setup   create .venv with the tested package set"
	@echo "make clean   remove caches (keeps .venv and runs)"

# The build backend comes from the constraints as well, so building the package fetches nothing unpinned.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt hatchling
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

setup: $(STAMP)

demo: $(STAMP)
	$(BIN)/python -m unlatch.demo

# Warnings are errors: a link that leads nowhere, a page that nobody lists, a docstring that cannot be read.
docs: $(STAMP)
	$(BIN)/python -m sphinx -q -W --keep-going docs docs/_build/html
	@echo "open docs/_build/html/index.html"

# The daily loop: what needs processes of its own is left to `make test`.
check: $(STAMP)
	@status=0; \
	$(MAKE) --no-print-directory lint || status=1; \
	$(BIN)/python -m pytest -q -n 2 $(SPREAD) --ignore=tests/multiproc --ignore=tests/faults --ignore=tests/cli \
		--ignore=tests/test_examples.py --ignore=tests/test_docs.py $(PYTEST_ARGS) || status=1; \
	exit $$status

# Each check runs even if an earlier one fails, so that one run shows everything; pytest's summary comes last.
test: $(STAMP)
	@status=0; \
	$(MAKE) --no-print-directory lint || status=1; \
	$(BIN)/python -m pytest -n $(WORKERS) $(SPREAD) $(PYTEST_ARGS) || status=1; \
	exit $$status

# With the tests elsewhere that try a fault. UNLATCH_FAULT_TABLE=table.md writes the table down as well.
faults: $(STAMP)
	UNLATCH_TEST_FAULTS=all $(BIN)/python -m pytest -q -rfE -n 2 $(SPREAD) tests/faults tests/runtime/test_injector.py \
		$$($(BIN)/python tests/support/fault_cover.py) $(PYTEST_ARGS)

# Cases per test; slow ones take a share of it.
FUZZ ?= 20000
fuzz: $(STAMP)
	UNLATCH_FUZZ=$(FUZZ) $(BIN)/python -m pytest -n 2 tests/fuzz -o timeout=14400 -o faulthandler_timeout=15000 $(PYTEST_ARGS)

lint: $(STAMP)
	@status=0; \
	$(BIN)/lint-imports --no-logo & imports=$$!; \
	$(BIN)/ruff check . || status=1; \
	$(BIN)/mypy || status=1; \
	wait $$imports || status=1; \
	exit $$status

clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis dist build docs/_build
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
