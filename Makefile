# Everything a checkout can do. Each target sets up what it needs in $(VENV) first; the
# second time that takes no time.

PYTHON ?= python3
VENV ?= .venv
# Any spelling that pip takes, and where to look first. README.md says how to choose.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=

# The environment of the simulated GPUs (tests/simgpu): another one may be named, which is
# then used as it is.
SIMGPU_VENV ?= .venv-simgpu
SIMGPU_TORCH ?= torch==2.14.1
SIMGPU_SEEDS ?= 1 2 3
SIMGPU_MINUTES ?= 60

RUN := $(VENV)/bin/python
# Without bytecode files each process compiles nbdist again, a sixth of the tests' time.
unexport PYTHONDONTWRITEBYTECODE
AS_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

.PHONY: help demo lab quick test at-once alone more soak unforked upstream gpu simgpu simgpu-soak simgpu-mutants mutants matrix bench reliability lint docs wheel clean
.NOTPARALLEL:

help:
	@echo "make demo   run examples/quickstart.ipynb on 4 ranks, without a browser"
	@echo "make lab    open it in JupyterLab"
	@echo "make quick  ruff, and the tests that take seconds: what to run after each edit"
	@echo "make test   every test but the long ones and those of make more"
	@echo "make more   the tests with a browser, with several hosts, and of the examples;"
	@echo "            bash .ci/run has all: lint, docs, test, more and demo"
	@echo "make soak   the long ones"
	@echo "make unforked  some tests again, with ranks that are not forked"
	@echo "make upstream  PyTorch's and Horovod's own distributed tests; downloads 27 MB"
	@echo "make gpu    the tests and benchmarks of a machine with GPUs; writes out/gpu-report.md"
	@echo "make simgpu  the CUDA tests on simulated GPUs; installs 6 GB in $(SIMGPU_VENV)"
	@echo "make simgpu-soak  thousands of random calls on simulated GPUs"
	@echo "make mutants  whether the tests catch deliberate faults; writes a table into CONTRIBUTING.md"
	@echo "make matrix  a quick part of the tests with other versions of Python and torch"
	@echo "make bench  measure, and write docs/benchmarks.md"
	@echo "make reliability  run the fault matrix and the random faults, and write docs/reliability.md"
	@echo "make lint   ruff and mypy"
	@echo "make docs   the documentation as a site, in out/docs"
	@echo "make wheel  an installable wheel for this architecture, in out/wheel"
	@echo "make clean  remove $(VENV) and out/"

demo: $(VENV)/.notebook
	$(RUN) examples/run.py quickstart

lab: $(VENV)/.notebook
	$(RUN) -m jupyterlab $(AS_ROOT) examples/quickstart.ipynb

PYTEST := $(RUN) -m pytest -p tests.cpu_seconds -m "not slow"
QUICK := $(filter-out tests/test_shared_cluster.py tests/test_failure_report.py, \
	$(wildcard tests/test_*.py)) tests/amd \
	tests/telemetry tests/widgets --ignore=tests/telemetry/test_slow_ranks.py \
	--ignore=tests/widgets/test_browser.py
MORE := tests/examples tests/hosts tests/commands/test_wheel.py tests/widgets/test_browser.py \
	$(wildcard tests/notebook/test_*jupyterlab.py) tests/notebook/test_marimo.py
# Files run at once, one for each core.
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 8 ? n : 8)))
AT_ONCE = --dist loadfile --tx '$(WORKERS)*popen//python=$(RUN) tests/cpu_seconds.py $(RUN)'
# What these tests measure needs the cores for itself: they run alone, at the end.
ALONE := tests/telemetry/test_slow_ranks.py
# Some tests again, with ranks that are not forked.
UNFORKED := tests/reliability tests/clusters/test_cells.py \
	tests/collectives/test_small_slots.py

quick: $(VENV)/.test
	$(RUN) -m ruff check --quiet
	$(PYTEST) --quiet -k "not mypy" $(QUICK)

# Fails if it takes more CPU time than is allowed; `make test CPU_SECONDS=` takes another
# file with a number, for a slower machine.
CPU_SECONDS ?= .ci/cpu-seconds
test: $(VENV)/.test
	$(RUN) tests/cpu_seconds.py --limit $(CPU_SECONDS) \
		$(MAKE) --no-print-directory --keep-going at-once alone

at-once:
	$(PYTEST) $(AT_ONCE) $(addprefix --ignore=,$(ALONE) $(MORE))

alone:
	$(PYTEST) $(ALONE)

more: $(VENV)/.test
	$(RUN) tests/cpu_seconds.py $(PYTEST) $(AT_ONCE) $(MORE)

soak: $(VENV)/.test
	$(RUN) -m pytest -m slow

unforked: $(VENV)/.test
	NBDIST_PRELOAD=0 NBDIST_FORK_LAUNCHES=0 $(PYTEST) $(AT_ONCE) $(UNFORKED)

# A suite that cannot be downloaded is skipped.
upstream: $(VENV)/.test
	-$(RUN) tests/upstream/fetch.py
	$(RUN) -m pytest -m slow tests/upstream

gpu: $(VENV)/.test
	$(RUN) tests/gpu_report.py

simgpu: | $(SIMGPU_VENV)/bin/python
	tests/simgpu/build.sh $(SIMGPU_VENV)/bin/python out/simgpu
	$(SIMGPU_VENV)/bin/python tests/simgpu/run_tests.py out/simgpu \
		--seeds $(SIMGPU_SEEDS) --minutes $(SIMGPU_MINUTES)

simgpu-soak: | $(SIMGPU_VENV)/bin/python
	tests/simgpu/build.sh $(SIMGPU_VENV)/bin/python out/simgpu
	$(SIMGPU_VENV)/bin/python tests/simgpu/run_tests.py out/simgpu --slow --seeds 1 \
		--minutes $(SIMGPU_MINUTES)

simgpu-mutants: | $(SIMGPU_VENV)/bin/python
	tests/simgpu/build.sh $(SIMGPU_VENV)/bin/python out/simgpu
	$(SIMGPU_VENV)/bin/python tests/simgpu/mutants.py out/simgpu

mutants: $(VENV)/.test
	$(RUN) tests/mutants/run.py

matrix: | $(RUN)
	$(RUN) tests/matrix.py

bench: $(VENV)/.test
	$(RUN) -m benchmarks

reliability: $(VENV)/.test
	NBDIST_WRITE_RELIABILITY=1 $(RUN) -m pytest tests/reliability tests/chaos/test_chaos.py

lint: $(VENV)/.lint
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy

# Warnings are errors: a link that leads nowhere, a docstring that does not parse.
docs: $(VENV)/.docs
	$(RUN) -m sphinx --fail-on-warning --keep-going --quiet -c docs/site . out/docs

# The wheel is built from the sdist, so that the sdist is complete.
wheel: $(VENV)/.wheel
	rm -rf out/wheel
	$(RUN) -m build --outdir out/wheel/built
	PATH="$(abspath $(VENV))/bin:$$PATH" $(RUN) -m auditwheel repair --wheel-dir out/wheel out/wheel/built/*.whl
	$(RUN) -m abi3audit --strict --report out/wheel/*.whl

clean:
	rm -rf $(VENV) out

# An extra of pyproject.toml, installed: .venv/.notebook stands for nbdist[notebook]. An
# editable installation leaves out the extension of JupyterLab, which is linked.
EXTENSIONS := $(VENV)/share/jupyter/labextensions
$(VENV)/.%: pyproject.toml $(wildcard nbdist/collectives/*.c) | $(VENV)/.torch
	$(RUN) -m pip install --quiet --editable '.[$*]'
	@mkdir -p $(EXTENSIONS) && ln -sfn $(CURDIR)/nbdist/labextension $(EXTENSIONS)/nbdist
	@touch $@

$(SIMGPU_VENV)/bin/python:
	$(PYTHON) -m venv $(SIMGPU_VENV)
	$@ -m pip install $(SIMGPU_TORCH)
	$@ -m pip install --quiet --editable '.[test]'

$(VENV)/.torch: | $(RUN)
	$(RUN) -m pip install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(TORCH)
	@touch $@

$(RUN):
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit( \
		"nbdist needs Python 3.10 or newer, and $(PYTHON) is " + sys.version.split()[0] \
		+ ": name another, as in make demo PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
