# `make` lists the targets. Everything but test-gpu works on a machine with nothing but Python 3.10 or newer.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.up-to-date

# Installed before the package, so that its looser requirement is already met. TORCH=torch takes the newest,
# TRITON= (empty) whatever torch brings along.
TORCH  ?= torch==2.13.0
ifeq ($(shell uname -s),Linux)
TRITON ?= triton==3.6.0
endif

.DEFAULT_GOAL := help
.PHONY: help setup browser test test-all test-gpu check docs wheel bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "  make %-9s  %s\n", $$1, $$2}'

$(STAMP): pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(if $(TRITON),$(PY) -m pip install --quiet --disable-pip-version-check "$(TRITON)")
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[bench,cuda,dev,docs]"
	@touch $@

setup: $(STAMP)  ## make or update .venv

# The tests of the benchmark report run in a real browser. Without one they are skipped, and in CI they fail.
browser:
	@command -v chromium || command -v chromium-browser || command -v google-chrome || { \
	  if test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; \
	  else echo "no chromium here, and it takes root and apt-get to install it"; fi; \
	} || echo "chromium could not be installed"

test: $(STAMP) browser  ## what needs no GPU; PYTEST="-k decay" narrows it
	$(PY) -m pytest -m "not gpu and not nightly" -n 2 --dist worksteal $(PYTEST)

test-all: $(STAMP) browser  ## the same with every case: architectures, orders of events, fp16, long tests
	$(PY) -m pytest -m "not gpu" -n 2 --dist worksteal $(PYTEST)

test-gpu:  ## the GPU tests, under the machine's own python3: needs torch, triton, pytest-xdist there
	PYTHONPATH=. $(PYTHON) -m pytest -m "gpu and not slow" -n 8 tests $(PYTEST)
	PYTHONPATH=. $(PYTHON) -m pytest -m "gpu and slow" tests $(PYTEST)

check: $(STAMP)  ## lint, format, types, size limits, generated tables
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(PY) tools/size_guard.py
	$(PY) tools/dispatch_table.py --check
	$(PY) tools/models_table.py --check
	$(PY) tools/parallel_plans.py --check
	$(PY) tools/performance.py --check

docs: $(STAMP)  ## build the site into build/site; fails on a broken link
	$(VENV)/bin/mkdocs build --quiet

wheel:  ## build the wheel and try it in a clean venv with core dependencies alone
	$(PYTHON) tools/check_wheel.py

bench: $(STAMP)  ## the suite `quick` on this machine and its report, into build/bench; BENCH="--dtype fp32" is passed on
	rm -f build/bench/quick.jsonl
	$(PY) -m fulmen bench run quick --out build/bench/quick.jsonl $(BENCH)
	$(PY) -m fulmen bench report build/bench/quick.jsonl --out build/bench

clean:  ## remove caches and build products; .venv stays
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -type d -prune -exec rm -rf {} +
