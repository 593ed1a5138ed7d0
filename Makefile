# Every target installs what it needs into $(VENV) on the first call, and reuses it afterwards.
#
#   make install   gpuload, with NVIDIA's image codec (the wheel for CUDA 13, which also works without a GPU) and Kornia
#   make demo      run the demo
#   make test      the tests of the package, with torch's build for the CPU; ARGS="-k ring" passes arguments on to pytest
#   make test-fast the fast ones of these, without processes and interpreted kernels; under a minute
#   make test-integrations  the tests with other libraries: frameworks, storage formats, DALI, Ray, nvImageCodec, timm, the
#                  command line; 4 GB of packages
#   make test-docs the tests of pages, examples, notebooks, benchmarks and packaging; 4 GB of packages
#   make test-all  all of these, and all combinations of test parameters; the nightly workflow runs it
#   make test-cuda-fake  the tests marked `cuda` without a GPU: on a fake CUDA runtime underneath the real CUDA build of
#                  torch (tests/fakecuda), in a separate environment of 5 GB; POLICY="side first" runs streams in another order
#   make lint      ruff and pyright
#   make format    ruff fixes what it can, and formats
#   make bench     gpuload compared with other loaders; ARGS="--photos DIR" passes arguments on
#   make bench-gpu loaders end to end on a GPU; ARGS="why", "decoding" or "peers", with --simulate on the CPU; see also
#                  benchmarks/gpu.sh
#   make notebooks run the notebooks and write their outputs into them
#   make docs      build the documentation site in build/docs; a warning is an error
#   make rates     measure README.md's plot and table and docs/performance.md's tables again; ARGS="--photos DIR"; 15 minutes
#   make pictures  draw README.md's plot, tables and picture again, from benchmarks/results and with gpuload's transforms
#   make soak      ten minutes of loading while a worker is killed every second and files are damaged; ARGS as for bench
#   make dist      build and check the wheel and the sdist in dist/; RELEASING.md has the next steps
#   make api       record the public names and signatures again (tests/public_api.txt)
#
# CUDA_MAJOR=12 installs the packages for a torch built for CUDA 12. They overwrite the packages for CUDA 13: run `make clean` first.
# TORCH_INDEX= installs torch from PyPI, built for CUDA, for the targets that otherwise install its build for the CPU.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
CUDA_MAJOR ?= 13
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# torch's builds for CUDA bring the Triton that they need; this one runs with its build for the CPU.
TRITON ?= triton==3.6.0

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
INSTALL := $(PIP) install --constraint constraints.txt
# Unlike an installed package, an editable install is not compiled, which would slow down each worker process.
COMPILE := $(BIN)/python -m compileall -q gpuload
EVERYTHING := --editable '.[cu$(CUDA_MAJOR),dali-cu$(CUDA_MAJOR),fused,cli,demo,kornia]'

# Run as many tests in parallel as there are processors, with one torch thread in each: threads of several processes that
# wait for each other take ten times as long. pytest does not start if a package that the target requires is missing
# (`REQUIRED` in tests/helpers/lacking.py).
SIDE_BY_SIDE := --numprocesses logical --maxprocesses 8 --dist worksteal
REQUIRE = GPULOAD_REQUIRE_PACKAGES=$(@:test-fast=test)
TEST = $(REQUIRE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SIDE_BY_SIDE)
OF_THE_PACKAGE := tests --ignore=tests/project

# The CUDA build of torch for the fake runtime, and its order of streams (tests/fakecuda/runtime.py lists all orders).
FAKE_VENV ?= .venv-cuda-fake
FAKE_TORCH ?= 2.14.1
POLICY ?= lazy
ON_FAKE = $(REQUIRE) FAKECUDA_POLICY="$(POLICY)" OMP_NUM_THREADS=1 $(FAKE_VENV)/bin/python tests/fakecuda/build.py \
	-m pytest $(SIDE_BY_SIDE) --timeout 200

.PHONY: install demo test test-fast test-integrations test-docs test-all test-cuda-fake lint format bench bench-gpu \
	notebooks docs rates pictures soak dist api clean
.DELETE_ON_ERROR:

install: $(VENV)/.installed

demo: $(VENV)/.installed-demo
	$(BIN)/gpuload demo $(ARGS)

test: $(VENV)/.installed-test
	$(TEST) $(OF_THE_PACKAGE) $(ARGS)

test-fast: $(VENV)/.installed-test
	$(TEST) --durations 20 --durations-min 0.5 $(OF_THE_PACKAGE) \
		-m "not slow and not interpreter and not processes and not exhaustive and not integration" $(ARGS)

test-integrations: $(VENV)/.installed-test-integrations
	$(TEST) -m "integration and not exhaustive" $(OF_THE_PACKAGE) $(ARGS)

test-docs: $(VENV)/.installed-test-docs
	$(TEST) --nbmake -m "not exhaustive" tests/project notebooks $(ARGS)

test-all: $(VENV)/.installed-test-docs
	$(TEST) --nbmake -m "" tests notebooks $(ARGS)

# Kernels run in Triton's interpreter, except in the last command, whose tests inspect only the launches of compiled kernels.
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

bench-gpu: TORCH_INDEX = # torch built for CUDA
bench-gpu: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.gpu $(ARGS)

notebooks: $(VENV)/.installed-test-docs
	$(BIN)/python -m pytest --nbmake --overwrite notebooks $(ARGS)

docs: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx --nitpicky --fail-on-warning --keep-going -b html docs build/docs $(ARGS)

rates: $(VENV)/.installed-lint
	$(BIN)/python -m benchmarks.loading --rounds 5 --json benchmarks/results/loading-cpu.json $(ARGS)
	$(BIN)/python -m benchmarks.plot_rates

pictures: $(VENV)/.installed-test-docs
	$(BIN)/python -m benchmarks.plot_rates
	$(BIN)/python -m benchmarks.plot_augmented

soak: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.soak $(ARGS)

# In isolated environments, as for anyone who builds the sdist. Release from a fresh clone: RELEASING.md.
dist: $(VENV)/.installed-dist
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

api: $(VENV)/.installed-test-integrations
	$(BIN)/python tests/public_api.py

clean:
	rm -rf $(VENV) $(FAKE_VENV) .pytest_cache .ruff_cache demo-out dist

# Dependency groups (PEP 735) need pip 25.1, and distributions come with older versions.
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

# torch by itself, so that pip asks the index of its builds for the CPU for nothing else.
$(VENV)/.installed-torch: $(VENV)/.pip constraints.txt
	$(INSTALL) --no-deps $(if $(TORCH_INDEX),--retries 2 --extra-index-url $(TORCH_INDEX) '$(TRITON)') torch
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed-torch pyproject.toml
	$(INSTALL) --editable '.[kornia,fused]' --group test
	$(COMPILE)
	touch $@

$(VENV)/.installed-test-integrations: $(VENV)/.installed-torch pyproject.toml
	$(INSTALL) $(EVERYTHING) --group test-integrations
	$(COMPILE)
	touch $@

$(VENV)/.installed-test-docs: $(VENV)/.installed-torch pyproject.toml
	$(INSTALL) $(EVERYTHING) --group test-docs
	$(COMPILE)
	touch $@

# Pyright reads all that the code imports.
$(VENV)/.installed-lint: $(VENV)/.installed-torch pyproject.toml
	$(INSTALL) $(EVERYTHING) --group dev
	$(COMPILE)
	touch $@ $(VENV)/.installed-test-integrations $(VENV)/.installed-test-docs # dev includes both

$(FAKE_VENV)/.installed-cuda-fake: $(FAKE_VENV)/.pip pyproject.toml constraints.txt
	grep -vE '^(torch|torchvision)==' constraints.txt > $(FAKE_VENV)/constraints.txt
	$(FAKE_VENV)/bin/python -m pip install --constraint $(FAKE_VENV)/constraints.txt torch==$(FAKE_TORCH) \
		--editable '.[cu13,fused,kornia,cli]' --group cuda-fake
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed-torch pyproject.toml
	$(INSTALL) --editable '.[demo]' --group docs
	$(COMPILE)
	touch $@

$(VENV)/.installed-bench: $(VENV)/.installed-torch pyproject.toml
	$(INSTALL) $(EVERYTHING) --group bench
	$(COMPILE)
	touch $@

$(VENV)/.installed-dist: $(VENV)/.pip pyproject.toml constraints.txt
	$(INSTALL) --group dist
	touch $@
