# Every target sets up what it needs from nothing, in $(VENV); a second call finds it there.
#
#   make install   gpuload, with NVIDIA's image codec (CUDA 13's wheel; it works without a GPU too) and Kornia
#   make demo      see it run
#   make test      the tests of the package; ARGS="-k ring" passes arguments on to pytest
#   make test-fast those of them that take no time: no processes, no interpreted kernels; under a minute
#   make test-docs the tests of pages, examples, notebooks, benchmarks and packaging
#   make test-all  all of these, and the full products of matrices; the nightly workflow runs it
#   make test-cuda-fake  the tests marked `cuda` without a GPU: on a fake CUDA runtime below the real CUDA build of torch
#                  (tests/fakecuda), in an environment of its own of 5 GB; POLICY="side first" runs streams in another order
#   make lint      ruff and pyright
#   make format    ruff mends what it can, and formats
#   make bench     gpuload beside others; ARGS="--photos DIR" passes arguments on
#   make bench-gpu loaders end to end on a GPU; ARGS="--simulate" runs it through on the CPU; benchmarks/gpu.sh does more
#   make notebooks run the notebooks and write their outputs into them
#   make docs      the documentation site, into build/docs; a warning is an error
#   make rates     measure README.md's plot and table and docs/performance.md's tables anew; ARGS="--photos DIR"; quarter of an hour
#   make pictures  draw README.md's plot, tables and picture again, from benchmarks/results and by gpuload's transforms
#   make soak      ten minutes in which a worker is killed every second and files are damaged; ARGS as for bench
#   make dist      the wheel and the sdist in dist/, checked; RELEASING.md has the rest
#   make api       write the public names and signatures anew (tests/public_api.txt)
#
# CUDA_MAJOR=12 takes the packages for a torch built for CUDA 12. They overwrite those for CUDA 13: `make clean` before.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
CUDA_MAJOR ?= 13

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
INSTALL := $(PIP) install --constraint constraints.txt
# An editable install is not compiled as an installed package is, and each worker process would pay for it.
COMPILE := $(BIN)/python -m compileall -q gpuload
EVERYTHING := --editable '.[cu$(CUDA_MAJOR),dali-cu$(CUDA_MAJOR),fused,cli,demo,kornia]'

# As many tests at once as there are processors, and in each one thread of torch: threads of several processes that wait
# for each other take ten times as long.
SIDE_BY_SIDE := --numprocesses logical --maxprocesses 8 --dist worksteal
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SIDE_BY_SIDE)
OF_THE_PACKAGE := tests --ignore=tests/project

# The CUDA build of torch that the fake runtime stands below. Its order of streams: tests/fakecuda/runtime.py has the others.
FAKE_VENV ?= .venv-cuda-fake
FAKE_TORCH ?= 2.14.1
POLICY ?= lazy
ON_FAKE := FAKECUDA_POLICY="$(POLICY)" OMP_NUM_THREADS=1 $(FAKE_VENV)/bin/python tests/fakecuda/build.py -m pytest \
	$(SIDE_BY_SIDE) --timeout 200

.PHONY: install demo test test-fast test-docs test-all test-cuda-fake lint format bench bench-gpu notebooks docs rates pictures soak dist api clean
.DELETE_ON_ERROR:

install: $(VENV)/.installed

demo: $(VENV)/.installed-demo
	$(BIN)/gpuload demo $(ARGS)

test: $(VENV)/.installed-test
	$(TEST) $(OF_THE_PACKAGE) $(ARGS)

test-fast: $(VENV)/.installed-test
	$(TEST) --durations 20 --durations-min 0.5 -m "not slow and not interpreter and not processes and not exhaustive" \
		$(OF_THE_PACKAGE) $(ARGS)

test-docs: $(VENV)/.installed-test
	$(TEST) --nbmake tests/project notebooks $(ARGS)

test-all: $(VENV)/.installed-test
	$(TEST) --nbmake -m "" tests notebooks $(ARGS)

# Kernels run in Triton's interpreter; then those tests that look at launches alone, of kernels that are compiled.
test-cuda-fake: $(FAKE_VENV)/.installed-cuda-fake
	$(ON_FAKE) -m cuda -rs $$(grep -rlE 'mark\.cuda' tests --include='test_*.py') $(ARGS)
	$(ON_FAKE) tests/simulated tests/fakecuda $(ARGS)
	TRITON_INTERPRET=0 $(ON_FAKE) -m cuda tests/cuda/test_kernels.py tests/fakecuda/test_launches.py $(ARGS)

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

rates: $(VENV)/.installed-lint
	$(BIN)/python -m benchmarks.loading --rounds 5 --json benchmarks/results/loading-cpu.json $(ARGS)
	$(BIN)/python -m benchmarks.plot_rates

pictures: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.plot_rates
	$(BIN)/python -m benchmarks.plot_augmented

soak: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.soak $(ARGS)

# In environments of their own, as at those who build the sdist. Release from a fresh clone: RELEASING.md.
dist: $(VENV)/.installed-dist
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

api: $(VENV)/.installed-test
	$(BIN)/python tests/public_api.py

clean:
	rm -rf $(VENV) $(FAKE_VENV) .pytest_cache .ruff_cache demo-out dist

# Dependency groups (PEP 735) need pip 25.1, and distributions bring an older one.
%/.pip:
	$(PYTHON) -m venv $*
	$*/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	touch $@

$(VENV)/.installed: $(VENV)/.pip pyproject.toml constraints.txt
	$(INSTALL) --editable '.[cu$(CUDA_MAJOR),kornia]'
	$(COMPILE)
	touch $@

$(VENV)/.installed-demo: $(VENV)/.pip pyproject.toml constraints.txt
	$(INSTALL) --editable '.[cu$(CUDA_MAJOR),kornia,cli,demo]'
	$(COMPILE)
	touch $@

$(VENV)/.installed-test: $(VENV)/.pip pyproject.toml constraints.txt
	$(INSTALL) $(EVERYTHING) --group test
	$(COMPILE)
	touch $@

$(VENV)/.installed-lint: $(VENV)/.pip pyproject.toml constraints.txt
	$(INSTALL) $(EVERYTHING) --group dev
	$(COMPILE)
	touch $@ $(VENV)/.installed-test # of which dev has all

$(FAKE_VENV)/.installed-cuda-fake: $(FAKE_VENV)/.pip pyproject.toml constraints.txt
	grep -vE '^(torch|torchvision|triton)==' constraints.txt > $(FAKE_VENV)/constraints.txt
	$(FAKE_VENV)/bin/python -m pip install --constraint $(FAKE_VENV)/constraints.txt torch==$(FAKE_TORCH) \
		--editable '.[cu13,fused,kornia,cli]' --group cuda-fake
	touch $@

$(VENV)/.installed-docs: $(VENV)/.pip pyproject.toml constraints.txt
	$(INSTALL) --editable '.[demo]' --group docs
	$(COMPILE)
	touch $@

$(VENV)/.installed-bench: $(VENV)/.pip pyproject.toml constraints.txt
	$(INSTALL) $(EVERYTHING) --group bench
	$(COMPILE)
	touch $@

$(VENV)/.installed-dist: $(VENV)/.pip pyproject.toml constraints.txt
	$(INSTALL) --group dist
	touch $@
