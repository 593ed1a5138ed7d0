# Every target sets up what it needs from nothing, in $(VENV); a second call finds it there.
#
#   make install   gpuload, with NVIDIA's image codec (CUDA 12's wheel; it works without a GPU too)
#   make demo      see it run
#   make test      all tests and the notebooks; ARGS="-k ring" passes arguments on to pytest
#   make test-fast the tests that take no time: no processes, no interpreted kernels; under a minute
#   make lint      ruff and pyright
#   make format    ruff mends what it can, and formats
#   make bench     gpuload beside others; ARGS="--photos DIR" passes arguments on
#   make bench-gpu loaders end to end on a GPU; ARGS="--simulate" runs it through on the CPU; benchmarks/gpu.sh does more
#   make notebooks run the notebooks and write their outputs into them
#   make docs      the documentation site, into build/docs; a warning is an error
#   make pictures  draw the pictures of the documentation from benchmarks/results
#   make soak      ten minutes in which a worker is killed every second and files are damaged; ARGS as for bench

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
INSTALL := $(PIP) install --constraint constraints.txt
# An editable install is not compiled as an installed package is, and each worker process would pay for it.
COMPILE := $(BIN)/python -m compileall -q gpuload
EVERYTHING := --editable '.[cu12,dali,fused,cli,demo]'

# As many tests at once as there are processors, and in each one thread of torch: threads of several processes that wait
# for each other take ten times as long.
SIDE_BY_SIDE := --numprocesses logical --maxprocesses 8 --dist worksteal
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SIDE_BY_SIDE)

.PHONY: install demo test test-fast lint format bench bench-gpu notebooks docs pictures soak clean
.DELETE_ON_ERROR:

install: $(VENV)/.installed

demo: $(VENV)/.installed-demo
	$(BIN)/gpuload demo $(ARGS)

test: $(VENV)/.installed-test
	$(TEST) --nbmake tests notebooks $(ARGS)

test-fast: $(VENV)/.installed-test
	$(TEST) --durations 20 --durations-min 0.5 -m "not slow and not interpreter and not processes" tests $(ARGS)

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.installed-lint
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

bench: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.loading $(ARGS)

bench-gpu: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.gpu $(ARGS)

notebooks: $(VENV)/.installed-test
	$(BIN)/python -m pytest --nbmake --overwrite notebooks $(ARGS)

docs: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx --nitpicky --fail-on-warning --keep-going -b html docs build/docs $(ARGS)

pictures: $(VENV)/.installed-docs
	$(BIN)/python -m benchmarks.pictures

soak: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.soak $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache demo-out

# Dependency groups (PEP 735) need pip 25.1, and distributions bring an older one.
$(VENV)/.pip:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade 'pip>=25.1'
	touch $@

$(VENV)/.installed: $(VENV)/.pip pyproject.toml constraints.txt
	$(INSTALL) --editable '.[cu12]'
	$(COMPILE)
	touch $@

$(VENV)/.installed-demo: $(VENV)/.pip pyproject.toml constraints.txt
	$(INSTALL) --editable '.[cu12,cli,demo]'
	$(COMPILE)
	touch $@

$(VENV)/.installed-test: $(VENV)/.pip pyproject.toml constraints.txt
	$(INSTALL) $(EVERYTHING) --group test
	$(COMPILE)
	touch $@

$(VENV)/.installed-lint: $(VENV)/.pip pyproject.toml constraints.txt
	$(INSTALL) $(EVERYTHING) --group dev
	$(COMPILE)
	touch $@

$(VENV)/.installed-docs: $(VENV)/.pip pyproject.toml constraints.txt
	$(INSTALL) --editable . --group docs
	$(COMPILE)
	touch $@

$(VENV)/.installed-bench: $(VENV)/.pip pyproject.toml constraints.txt
	$(INSTALL) $(EVERYTHING) --group bench
	$(COMPILE)
	touch $@
