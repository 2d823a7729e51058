# Two commands for a newcomer: `make quickstart` and `make test`. Both may be run as often as one likes.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: quickstart test test-full clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dolmen needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/tested: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

quickstart: .venv/installed
	$(BIN)/dolmen train quickstart --overwrite

# one row per mechanism
test: .venv/tested
	$(BIN)/ruff format --check dolmen tests benchmarks
	$(BIN)/ruff check dolmen tests benchmarks
	$(BIN)/python -m pytest

# everything: each row of the golden table, more kills, compiled kernels
test-full: .venv/tested
	$(BIN)/ruff format --check dolmen tests benchmarks
	$(BIN)/ruff check dolmen tests benchmarks
	$(BIN)/python -m pytest --full

clean:
	rm -rf .venv runs .pytest_cache
