# Every target installs what it needs first. `make demo` and `make test` are the two to start with.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test fuzz faults long-run lint format bench docs results world world-check clean

demo: $(VENV)/.ready
	@echo "demo: patches a small model that knows the world of 2018 with what has changed since"
	@$(BIN)/factpatch demo

test: $(VENV)/.ready-dev
	@echo "test: running the tests"
	@$(BIN)/pytest -n 2 --dist loadfile
	@echo "test: running the GPU kernels in Triton's interpreter"
	@# Without conftest.py, which these tests do not need and whose imports take seconds.
	@# pytest's status is 5 on systems without Triton, where no tests are found.
	@TRITON_INTERPRET=1 $(BIN)/pytest --noconftest tests/test_kernels.py || [ $$? -eq 5 ]

# Reads 100,000 random and damaged files: only the package's own errors may come out. Takes about half an hour.
fuzz: $(VENV)/.ready-dev
	FACTPATCH_FUZZ=100000 $(BIN)/pytest -n 2 tests/test_fuzz.py tests/test_fuzz_tensors.py

# Kills and disturbs the commands, each several times: a rerun must give the undisturbed result. Takes about an hour.
faults: $(VENV)/.ready-dev
	$(BIN)/python tools/faults.py

# One hour of edits, merges, applies, reverts and questions in random order, with checks.
long-run: $(VENV)/.ready-dev
	$(BIN)/python tools/long_run.py --minutes 60

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

# Runs the experiments of tools/experiments and writes docs/results: hours of GPU time, in steps that resume.
# make results ONLY=fact-checking ARGS="--dry-run" (or --jobs 3, --pages, --help)
results: $(VENV)/.ready-dev
	$(BIN)/python tools/results.py $(if $(ONLY),--only $(ONLY)) $(ARGS)

# Trains the embedded model and editor: 9 minutes on a GPU (DEVICE=cuda). `make world-check` measures them.
DEVICE ?= cpu
world: $(VENV)/.ready-dev
	OMP_NUM_THREADS=2 $(BIN)/python tools/make_world.py --device $(DEVICE)

world-check: $(VENV)/.ready-dev
	$(BIN)/python tools/check_world.py

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache

# torch comes first and in exactly this version: a looser requirement can pull in gigabytes of GPU packages.
$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "factpatch needs Python 3.11 or newer; set PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || { echo "setup: creating a virtual environment in $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "setup: installing torch (about 200 MB)"
	@$(PIP) torch==2.13.0
	@echo "setup: installing factpatch"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	@echo "setup: installing the tests' dependencies"
	@$(PIP) --editable '.[dev]'
	@touch $@
