# Two commands for a newcomer: `make quickstart` and `make test`. Both may be run as often as one likes.
# On a machine with a GPU: `make gpu`, with its own Python and no network (docs/performance.md).
PYTHON ?= python3
BIN := .venv/bin
MINUTES ?= 25
OUT ?= runs/gpu
WHEELS ?= .whl
GPU_ARGS ?=
GPU_PYTHON ?= 3.12
GPU_MACHINE ?= x86_64

# what is linted; and the tests of `make coverage`: all, or TESTS=tests/parallel
LINTED := dolmen tests benchmarks examples website
TESTS ?= tests
# a worker more than cores, as many tests wait for processes, and a core per process; hundreds of
# processes compile the same files once, also where the machine keeps no bytecode
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(os.cpu_count() + 1)')
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

# stages of `make rlhf`: all, or RLHF='dpo grpo'
RLHF ?=

.PHONY: quickstart rlhf rlhf-controls check lint types quick test test-full coverage docs wheel gpu wheels clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dolmen needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/tested: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

.venv/documented: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

quickstart: .venv/installed
	$(BIN)/dolmen train quickstart --overwrite

# SFT, reward model, DPO, GRPO and PPO on two cores, measured, as a page: build/rlhf/rlhf.html
rlhf: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.rlhf $(RLHF)

# behind it: the same claims are to fail with each fault, over three seeds
rlhf-controls: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.rlhf.controls

lint: .venv/tested
	$(BIN)/ruff format --check $(LINTED)
	$(BIN)/ruff check $(LINTED)
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.citation-file-format CITATION.cff

# pyright, over what pyproject.toml lists; node comes with it, in a wheel, and nothing is fetched
types: .venv/tested
	$(BIN)/pyright --pythonpath $(BIN)/python

# a first look in a minute and a half: lint, and types beside what is quick
check: lint
	$(MAKE) --no-print-directory --jobs 2 --output-sync types quick

# nothing that starts processes or calls a whole command (tests/needs.py), or that is slow
quick: .venv/tested
	$(PYTEST) --dist worksteal -m 'not spawn and not command and not slow'

# one row per mechanism
test: lint
	$(PYTEST) --dist loadfile

# everything: each row of the golden table, more kills, compiled kernels
test-full: lint
	$(PYTEST) --dist loadfile --full

# everything a GPU is asked; what this Python lacks comes from the folder of wheels
gpu:
	$(PYTHON) -m benchmarks.gpu --minutes $(MINUTES) --out $(OUT) --wheels $(WHEELS) $(GPU_ARGS)

# where there is a network: what a machine with a GPU was seen to lack
wheels:
	$(PYTHON) -m benchmarks.gpu.packages --to $(WHEELS) --python $(GPU_PYTHON) --machine $(GPU_MACHINE)

# lines that only run in processes that a test has started are counted too: build/coverage/html/index.html
coverage: .venv/tested
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(TESTS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage html --quiet
	$(BIN)/coverage report --skip-covered --sort=cover

# the site, in build/site; a broken link is an error (with --quiet it would be none)
docs: .venv/documented
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -f website/mkdocs.yml

# a wheel of this checkout, installed elsewhere, trains
wheel: .venv/tested
	$(BIN)/python -m pytest --full tests/test_wheel.py

clean:
	rm -rf .venv build runs .pytest_cache
