# Each target makes the environment it needs and reuses it afterwards: `make demo` is enough on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
RUNTIME := .venv/.runtime
DEV := .venv/.dev
DOCS := .venv/.docs

.PHONY: demo test test-slow test-gpu gpu fuzz lint bench docs

demo: $(RUNTIME)
	$(BIN)/dino-vit demo

test: $(DEV)
	$(BIN)/pytest -q -n auto --dist loadfile -m "not slow and not gpu"

test-slow: $(DEV)
	$(BIN)/pytest -q -m slow

test-gpu: $(DEV)
	$(BIN)/pytest -q -m gpu tests/gpu

gpu: $(DEV)
	$(BIN)/python -m benchmarks gpu

fuzz: $(DEV)
	$(BIN)/python -m tests.fuzz

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(DEV)
	$(BIN)/python -m benchmarks

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "The site is in site/. To look at it: $(BIN)/mkdocs serve"

$(RUNTIME): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "dino-vit needs Python 3.11 to 3.13, but $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	       "Name another one: make PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing dino-vit and PyTorch into .venv (several GB, some minutes the first time) ..."
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[map]'
	@touch $@

$(DEV): $(RUNTIME)
	@echo "Installing the test tools and the peers that the tests compare with ..."
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

$(DOCS): $(RUNTIME)
	@echo "Installing what makes the site ..."
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[docs]'
	@touch $@
