# make demo    the main job: examples/demo.py; ARGS="--help" shows its knobs
# make test    everything: GoogleTest programs and pytest
# make build   .venv and the library, which the others start with
# make lint    formatters and linters, as a check; make format lets them write
#
# CUDA=0                           the CPU half alone
# CUDA_ARCHS="90a-real"            kernels for these compute capabilities alone
# PYTHON=python3.12                the Python that .venv is made from
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.NOTPARALLEL:
.PHONY: build demo test lint format clean

PYTHON ?= python3
CUDA ?= 1
half := $(if $(filter 0,$(CUDA)),cpu,cuda)
tree := build/$(half)
archs := $(if $(CUDA_ARCHS),'-DOCTAVO_CUDA_ARCHITECTURES=$(CUDA_ARCHS)')
configured := $(tree)/.configured$(if $(CUDA_ARCHS),-$(subst ;,+,$(CUDA_ARCHS)))
sources = $$(find include csrc tests examples benchmarks -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
export PATH := $(CURDIR)/.venv/bin:$(PATH)

build: $(configured)
	cmake --build $(tree) --target octavo_python

demo: build .venv/.demo
	python examples/demo.py $(ARGS)

test: $(tree)/.tests
	cmake --build $(tree)
	ctest --preset $(half)
	python -m pytest $(ARGS)

lint: .venv/.lint
	clang-format --dry-run -Werror $(sources)
	ruff check
	ruff format --check

format: .venv/.lint
	clang-format -i $(sources)
	ruff check --fix
	ruff format

clean:
	rm -rf build python/octavo/lib

$(configured): .venv/.build $(if $(filter cuda,$(half)),.venv/.nvcc)
	cmake --fresh --preset $(half) -DPython3_EXECUTABLE=$(CURDIR)/.venv/bin/python $(archs)
	rm -f $(tree)/.configured*
	touch '$@'

$(tree)/.tests: $(configured) .venv/.test
	cmake -S . -B $(tree) -DOCTAVO_TESTS=ON
	touch $@

# .venv, and one stamp for each dependency group of pyproject.toml in it.
.venv/.build: pyproject.toml
	PYTHON=$(PYTHON) tools/system_packages.sh g++ python3-venv
	[ -x .venv/bin/python ] || $(PYTHON) -m venv .venv
	python -m pip install 'pip>=25.1'
	python -m pip install --group build
	echo $(CURDIR)/python > "$$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/octavo.pth"
	touch $@

.venv/.nvcc: .venv/.build
	cuda=$$(python -W ignore -c 'import torch; print(torch.version.cuda)'); \
	  nvcc --version 2> /dev/null | grep -q "release $$cuda," || python -m pip install --group nvcc
	touch $@

.venv/.test .venv/.lint .venv/.demo: .venv/.%: .venv/.build
	$(if $(filter test,$*),tools/system_packages.sh libgtest-dev)
	python -m pip install --group $*
	touch $@
