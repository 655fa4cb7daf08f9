# Everything a contributor types. Set-up happens once, and again when its inputs change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.palingenesis-installed
# Processes that run tests, each with one thread and about 2 GB.
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup browser demo test format bench docs

help:
	@echo "make demo     train a small language model twice, break a layer, watch it being named"
	@echo "make test     style, types and every test"
	@echo "make format   put the code into the project's style"
	@echo "make bench    measure what monitoring costs"
	@echo "make docs     build the documentation into site/"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints/ci.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		-c constraints/ci.txt -e '.[sft,lightning,trackers,plots,demo,dev]'
	@touch $@

# The report is tested in a real browser. Where none can be installed, those tests skip and say so.
browser:
	@if command -v chromium >/dev/null || command -v chromium-browser >/dev/null \
		|| command -v google-chrome >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing chromium for the browser tests"; \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
			--no-install-recommends chromium fonts-dejavu-core; } >/dev/null \
			|| echo "chromium could not be installed: the browser tests will skip"; \
	else echo "no chromium found: the browser tests will skip"; fi

demo: setup
	$(BIN)/pgs demo

test: export OMP_NUM_THREADS = 1
test: setup browser
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: export OMP_NUM_THREADS = 1
bench: setup
	$(BIN)/python benchmarks/run.py

docs: export NO_MKDOCS_2_WARNING = 1
docs: setup
	$(BIN)/mkdocs build --strict --quiet
