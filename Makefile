# The set-up of a fresh machine: Python 3.11 or later, pip and make are enough.
PYTHON ?= python3
VENV ?= .venv
RANKS ?= 2
JOBS ?= 2
CONSTRAINTS ?= constraints.txt
MATRIX ?= 2.11 2.13 2.14
# More arguments, for example: make demo DEMO_ARGS="--steps 60 --json demo.json"; make test TEST_ARGS="-k weights -x"
DEMO_ARGS ?=
TEST_ARGS ?=
SWEEP_ARGS ?= --experts grouped_mm,batched_mm,eager --bf16 --inductor --timeout 900 --json build/sweep.json --markdown benchmarks/HF_FAMILIES.md

BLOCKS ?= 5000
SEED := $(or $(SEED),$(shell date +%s))

INSTALLED := $(VENV)/.gtp-compile-installed
BUILT := build/typecheck

.PHONY: help venv demo test test-matrix blocks sweep lint format clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    train a small Qwen3-MoE on RANKS=2 processes and show the gradients' errors"
	@echo "make test    run the tests that need no GPU"
	@echo "make test-matrix    the same on torch $(MATRIX), each in a .venv-VERSION of its own"
	@echo "make blocks  train BLOCKS=$(BLOCKS) random MoE blocks on two ranks, beside plain twins; SEED=... for the same ones again"
	@echo "make sweep   train every Hugging Face family with experts on two ranks, beside a plain twin (hours)"
	@echo "make lint    ruff and mypy"
	@echo "make format  let ruff rewrite the files"
	@echo "make venv    create $(VENV) only; the targets above do it by themselves"
	@echo "make clean   remove what was built; $(VENV) stays"

venv: $(INSTALLED)

$(VENV)/pyvenv.cfg:
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml $(CONSTRAINTS) | $(VENV)/pyvenv.cfg
	$(VENV)/bin/python -m pip install -c $(CONSTRAINTS) -e ".[demo,test,lint]"
	@touch $@

demo: $(INSTALLED)
	$(VENV)/bin/gtp-compile demo --ranks $(RANKS) $(DEMO_ARGS)

# -P keeps the root off sys.path; pyproject.toml says why. worksteal: the slow tests stand side by side in one folder.
test: $(INSTALLED)
	$(VENV)/bin/python -P -m pytest -n $(JOBS) --dist worksteal $(TEST_ARGS)

# What torch itself pins may differ between its versions.
test-matrix:
	@mkdir -p build
	@for version in $(MATRIX); do \
		{ grep -vE '^(torch|triton|numpy|setuptools)==' constraints.txt; echo "torch==$$version.*"; } > build/constraints-$$version.txt; \
		echo "== torch $$version"; \
		$(MAKE) --no-print-directory test VENV=.venv-$$version CONSTRAINTS=build/constraints-$$version.txt || exit 1; \
	done

# The tests take 300 of seed 0.
blocks: $(INSTALLED)
	@echo "seed $(SEED)"
	GTP_BLOCKS=$(BLOCKS) GTP_SEED=$(SEED) $(VENV)/bin/python -P -m pytest -n $(JOBS) tests/distributed/test_random_blocks.py $(TEST_ARGS)

# Not part of the tests, which take eight of the families.
sweep: $(INSTALLED)
	$(VENV)/bin/python tests/hf_sweep.py $(SWEEP_ARGS)

# mypy runs inside the built tree, so that it finds gtp_compile.passes and gtp_compile.kernels where an install puts them.
lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	rm -rf $(BUILT)
	$(VENV)/bin/python -c "import setuptools; setuptools.setup()" -q build_py --build-lib $(BUILT)
	cd $(BUILT) && $(abspath $(VENV))/bin/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p gtp_compile

format: $(INSTALLED)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find gtp_compile passes kernels tests -name __pycache__ -type d -prune -exec rm -rf {} +
