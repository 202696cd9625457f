# Everything a person needs: `make demo` and `make test`. The work is done by scripts/; this file only names it.
#
#   PYTHON=python3.12    interpreter for .venv (default: the first python3* that is new enough)
#   TORCH_SPEC=          the torch to install for the tests; empty: none, its tests are skipped
#   PEER_PYTHON=python3.11    interpreter for TFRA, a peer of the benchmarks (Python 3.9 to 3.11)
#   ARGS="--store redis" handed to `kvemb demo`, pytest, the benchmarks, chaos, or fuzz
#   SECONDS=180 SEED= STORE=redis    of chaos: how long, which schedule (drawn unless given), which storage kind; the first two of fuzz, too
#   MODE=async    of chaos: or sync, trainers that go in step

# One version rather than a range: on Linux a newer default wheel may bring gigabytes of CUDA.
TORCH_SPEC ?= torch==2.13.0
PYTHON ?=
ARGS ?=
PEER_PYTHON ?=
SECONDS ?= 180
SEED ?=
STORE ?= redis
MODE ?= async
export TORCH_SPEC PYTHON PEER_PYTHON
# The tests and the demo start hundreds of Python processes: what one has compiled the others shall find.
unexport PYTHONDONTWRITEBYTECODE

PY := .venv/bin/python

NOTEBOOKS := $(wildcard docs/tutorials/*.ipynb)

.PHONY: help docs diagrams demo quick test test-all chaos fuzz libraries peers readers frameworks notebooks compose-test lint format types bench bench-peers setup clean

help:
	@echo 'make demo     train skip-gram embeddings on a real local cluster (under 2 minutes)'
	@echo 'make quick    no servers: units, models of the protocols, the architecture (a minute)'
	@echo 'make test     every promise once, against real Valkey, Redis, Redis Cluster and memcached (about half an hour on two cores)'
	@echo 'make test-all the whole suite: also the slow tests, and whole clusters on every other storage kind (an hour on two cores)'
	@echo 'make chaos    random faults for $$SECONDS on $$STORE, in $$MODE: is every acknowledged push applied exactly once?'
	@echo 'make fuzz     bytes of any kind for $$SECONDS against shards and clients: does anything end, hang, grow, or harm an honest trainer?'
	@echo 'make libraries   tests beside torchfm, deepctr-torch, Lightning and others (docs/your-library.md; installs them into .libraries)'
	@echo 'make peers PEERS=folder   the tests of TorchRec that a folder has, with our classes in place of its own'
	@echo 'make readers  tests of the readers in C, Go, Java and JavaScript (examples/readers; installs compilers and clients of Redis)'
	@echo 'make chart    the tests of the Helm chart, which need helm and others (400 MB in .chart-tools); `make test` skips them without'
	@echo 'make frameworks  tests beside Keras on each backend, TensorFlow and JAX (docs/frameworks.md; installs them into .frameworks)'
	@echo 'make notebooks   run docs/tutorials, and keep what they print and draw in them'
	@echo 'make compose-test   the cluster of docker-compose.yml in containers: faults, growth (needs a Docker engine)'
	@echo 'make docs     build the site of docs/ into .docs/site; a warning or a dead link is an error'
	@echo 'make diagrams draws the pictures of docs/diagrams anew (needs Graphviz)'
	@echo 'make lint     ruff check and ruff format --check      make format   let ruff mend what it can'
	@echo 'make types    mypy --strict                           make bench    python -m benchmarks $$ARGS'
	@echo 'make bench-peers   set up TFRA, Keras, TensorFlow and JAX beside this checkout, for their lines in the benchmarks (about 3 GB)'
	@echo 'make setup    only prepare .venv for development      make clean    remove .venv, caches and builds'

demo:
	@sh scripts/setup.sh demo
	@exec .venv/bin/kvemb demo $(ARGS)

# A file's tests stay in one process, in which they share their cluster; the folders of slow tests come first. ARGS="-n 0 …": in this process.
# Tests with a Slurm are those of `make libraries`, which installs it.
PYTEST := $(PY) -m pytest -n auto --dist loadscope --no-loadscope-reorder

# No server, and of Hypothesis' examples a quarter; CI tries them all.
QUICK := -m 'not full and not long' --hypothesis-profile=$(if $(CI),kvemb,quick)

quick: setup
	@$(PYTEST) $(QUICK) tests/unit tests/models tests/test_architecture.py tests/test_names.py $(ARGS)

test: setup
	@sh scripts/servers.sh
	@$(PYTEST) $(QUICK) --most-starts 2500 $(ARGS) \
		&& echo 'Each promise was kept once. The slow tests and every other storage kind: make test-all' \
		|| { code=$$?; echo 'To run what failed again: make test ARGS="-n 0 --lf". A test that fails beside others only has a defect, too.'; exit $$code; }

test-all: setup
	@sh scripts/servers.sh
	@$(PYTEST) -m 'not long' --ignore=tests/libraries/test_slurm.py $(ARGS)

chaos: setup
	@sh scripts/servers.sh
	@PYTHONPATH=tests$${PYTHONPATH:+:$$PYTHONPATH} $(PY) -m chaos --store $(STORE) --mode $(MODE) --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(ARGS)

fuzz: setup
	@sh scripts/servers.sh
	@$(PY) -m tests.fuzz --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(ARGS)

libraries: setup
	@bash scripts/libraries.sh $(ARGS)

peers: setup
	@$(PY) -m tests.peers $(PEERS) $(ARGS)

readers: setup
	@sh scripts/servers.sh
	@bash scripts/readers.sh $(ARGS)

frameworks: setup
	@sh scripts/servers.sh
	@bash scripts/frameworks.sh $(ARGS)

notebooks: setup
	@bash scripts/frameworks.sh --install
	@PYTHONPATH=$(CURDIR)/.frameworks TF_CPP_MIN_LOG_LEVEL=3 TF_ENABLE_ONEDNN_OPTS=0 $(PY) scripts/notebooks.py $(NOTEBOOKS)

chart: setup
	@bash scripts/chart-tools.sh
	@$(PYTEST) tests/chart $(ARGS)

compose-test: setup
	@bash scripts/compose-test.sh $(ARGS)

lint: setup
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

format: setup
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

types: setup
	@$(PY) -m mypy

docs:
	@sh scripts/setup.sh docs
	@.docs/venv/bin/python docs/site/make_site.py

diagrams: setup
	@$(PY) docs/site/make_diagrams.py

bench: setup
	@sh scripts/servers.sh
	@$(PY) -m benchmarks $(ARGS)

bench-peers: setup
	@bash scripts/frameworks.sh --install
	@sh scripts/bench-peers.sh

setup:
	@sh scripts/setup.sh dev

clean:
	rm -rf .venv .docs .libraries .frameworks .servers .chart-tools build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./.git -prune -o -name __pycache__ -type d -exec rm -rf {} +
