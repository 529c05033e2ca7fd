# Every target sets up what it needs. `make demo` and `make test` are all a newcomer has to know.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint format bench docs world world-check clean

demo: $(VENV)/.ready
	@echo "demo: a small model that knows the world of 2018; what has changed since is patched, fact by fact"
	@$(BIN)/factpatch demo

test: $(VENV)/.ready-dev
	@echo "test: running the tests"
	@$(BIN)/pytest
	@echo "test: running the GPU's kernels in Triton's interpreter"
	@TRITON_INTERPRET=1 $(BIN)/pytest tests/test_kernels.py || [ $$? -eq 5 ] # no tests: no Triton for this system

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check src tests tools docs
	$(BIN)/ruff format --check src tests tools docs
	$(BIN)/pyright

format: $(VENV)/.ready-dev
	$(BIN)/ruff check --fix src tests tools docs
	$(BIN)/ruff format src tests tools docs

bench: $(VENV)/.ready
	$(BIN)/factpatch bench edit

docs: $(VENV)/.ready-dev
	$(BIN)/python docs/make_cli.py

# The embedded model and editor, from their facts: under half an hour on two cores. Then what they can do.
world: $(VENV)/.ready-dev
	OMP_NUM_THREADS=2 $(BIN)/python tools/make_world.py

world-check: $(VENV)/.ready-dev
	$(BIN)/python tools/check_world.py

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache

# torch is asked for exactly and first: a looser request can bring gigabytes of GPU packages along.
$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "factpatch needs Python 3.11 or newer; set PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || { echo "setup: making a virtual environment in $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "setup: installing torch (about 200 MB)"
	@$(PIP) torch==2.13.0
	@echo "setup: installing factpatch"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	@echo "setup: installing what the tests need"
	@$(PIP) --editable '.[dev]'
	@touch $@
