# Every target works from a bare checkout with Python >= 3.10 and pip: it makes its own virtual environment,
# installs what it needs (again only after pyproject.toml changed) and then runs.
#
#   make demo         a real language model with and without DSpark, side by side
#   make test         the test suite (PYTEST_ARGS="-m slow" for the slow part)
#   make lint         ruff, linter and formatter
#   make format       let ruff rewrite what `make lint` complains about
#   make test-floor   the test suite on the oldest supported transformers and on one in between
#   make test-interop the tests that load what is exported with the package speculators, which brings its own versions
#   make bench        plain generate, prompt lookup and DSpark in turn (BENCH_ARGS="--help" for the options)
#   make cards        render the model cards of hub_cards/ anew
#   make clean        remove the virtual environments
#
# Variables: PYTHON (python3), VENV (.venv), TORCH (what is installed when the environment has no torch;
# pip options are allowed, for example TORCH="torch --pre"), DEMO_ARGS, PYTEST_ARGS, BENCH_ARGS.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TRANSFORMERS_FLOOR ?= transformers==5.18.0
TRANSFORMERS_BETWEEN ?= transformers==5.22.0

comma := ,

DEMO_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?= --output bench.json

export PIP_DISABLE_PIP_VERSION_CHECK = 1

.DEFAULT_GOAL := help
.PHONY: help demo test lint format test-floor test-interop bench cards clean
.DELETE_ON_ERROR:

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

# $(call install,ENVIRONMENT,EXTRA,FURTHER REQUIREMENTS): torch first and by itself, so that an environment that
# already has one keeps it.
define install
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "dspark_hf needs Python 3.10 or newer, and $(PYTHON) is " + sys.version.split()[0] + ": run make with PYTHON=python3.12, say")'
	@test -x $(1)/bin/pip || { echo "==> $(1): new virtual environment"; $(PYTHON) -m venv $(1); }
	@$(1)/bin/python -c 'import importlib.util as u; raise SystemExit(u.find_spec("torch") is None)' || { \
		echo "==> $(1): installing $(TORCH)"; $(1)/bin/python -m pip install $(TORCH); }
	@echo "==> $(1): installing dspark_hf with its '$(2)' extra"
	$(1)/bin/python -m pip install -e ".[$(2)]" $(3)
	@touch $@
endef

$(VENV)/.installed-demo: pyproject.toml
	$(call install,$(VENV),demo,)

$(VENV)/.installed-dev: pyproject.toml
	$(call install,$(VENV),dev,)

.venv-floor/.installed-dev: pyproject.toml
	$(call install,.venv-floor,dev,"$(TRANSFORMERS_FLOOR)")

.venv-between/.installed-dev: pyproject.toml
	$(call install,.venv-between,dev,"$(TRANSFORMERS_BETWEEN)")

.venv-interop/.installed-dev: pyproject.toml
	$(call install,.venv-interop,dev$(comma)interop,)

demo: $(VENV)/.installed-demo
	$(VENV)/bin/dspark demo $(DEMO_ARGS)

test: $(VENV)/.installed-dev
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

test-floor: .venv-floor/.installed-dev .venv-between/.installed-dev
	.venv-floor/bin/python -m pytest $(PYTEST_ARGS)
	.venv-between/bin/python -m pytest $(PYTEST_ARGS)

test-interop: .venv-interop/.installed-dev
	.venv-interop/bin/python -m pytest -m interop tests/test_interop.py $(PYTEST_ARGS)

bench: $(VENV)/.installed-demo
	$(VENV)/bin/dspark bench $(BENCH_ARGS)

# A card a line, so that tests/test_card.py can render each in the same way.
cards: $(VENV)/.installed-demo
	$(VENV)/bin/dspark card dspark_hf/assets/smollm2-135m-instruct-drafter --target HuggingFaceTB/SmolLM2-135M-Instruct --licence apache-2.0 --dataset openai/gsm8k --eval docs/measurements/eval-greedy.json docs/measurements/eval-recommended.json --bench docs/measurements/bench-greedy.json docs/measurements/bench-temperature-1.json --output hub_cards/smollm2-135m-instruct-drafter.md

clean:
	rm -rf $(VENV) .venv-floor .venv-between .venv-interop
