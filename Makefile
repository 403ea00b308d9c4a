# `make help` lists the commands. Each one that needs an environment builds it first, or brings it up to date.
#
#   PYTHON=/path/to/python   the interpreter to build from (default: the first of those below that is 3.11 or newer)
#   VENV=.venv               where the environment lives
#   CONSTRAINTS=FILE         versions to install (default: constraints/jax-0.10.txt on Python 3.11, else jax-0.11.txt)
#   TORCH=no                 leave torch out; the tests that need it are skipped and counted
#   SETUP=no                 build nothing and use PYTHON as it is (container images that bring their own jax)
#   JOBS=2                   test processes
#   GPU_JOBS=8               processes of the GPU tests; each may take 30 GB of the GPU's memory, one of them 70 GB
#   ARGS="..."               more arguments for launch.py, pytest or the benchmark

VENV   ?= .venv
PYTHON ?= python3.11 python3.12 python3.13 python3.14 python3
TORCH  ?= yes
SETUP  ?= yes
JOBS   ?= $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -gt 8 ] && echo 8 || echo $$n)
GPU_JOBS ?= 8
ARGS   ?=

CONSTRAINTS ?=
# The GPU tests run on the vendor whose driver is here.
GPU ?= $(if $(wildcard /dev/kfd),rocm,$(if $(wildcard /dev/nvidiactl),cuda,none))

ifeq ($(SETUP),no)
RUN := $(firstword $(filter-out python3.%,$(PYTHON)) $(PYTHON))
BASE :=
else
RUN  := $(VENV)/bin/python
BASE := $(VENV)/.base
ifeq ($(TORCH),no)
TEST := $(VENV)/.test-base
else
TEST := $(VENV)/.test
endif
DEV      := $(VENV)/.dev
TRITON   := $(VENV)/.triton
TEST_GPU := $(VENV)/.$(GPU) $(VENV)/.test-base
# An environment whose interpreter is gone (a system upgrade, a moved folder) is stale too.
REBUILD := $(if $(shell $(VENV)/bin/python -c 'print("runs")' 2>/dev/null),,rebuild)
endif

.PHONY: help setup demo test test-slow test-gpu lint amd bench mutants chaos chaos-short clean rebuild
help:
	@echo "make setup     build $(VENV) with what a training run needs"
	@echo "make demo      train a small hybrid model on this Python's own library: minutes on 2 CPU cores"
	@echo "make test      the tests, on the CPU"
	@echo "make test-slow those that take minutes: every kind of sublayer on every mesh"
	@echo "make test-gpu  the tests that need a GPU"
	@echo "make mutants   plant seventeen faults, one at a time: each must make its test fail"
	@echo "make chaos     200 kills and every other fault five times, at random; make chaos-short is 30 and one"
	@echo "make lint      ruff, mypy, codespell"
	@echo "make amd       compile every GPU kernel for AMD Instinct, on any machine"
	@echo "make bench     time the kernels on this machine"
	@echo "make clean     remove environments and caches; runs/ stays"

setup: $(BASE)

demo: $(BASE)
	@$(RUN) launch.py --config=configs/tiny_hybrid.py $(ARGS)

test: $(TEST)
	@$(RUN) -m pytest -n $(JOBS) $(ARGS)

test-slow: $(TEST)
	@$(RUN) -m pytest -m slow -n $(JOBS) --dist loadfile $(ARGS)

test-gpu: $(TEST_GPU)
	@$(RUN) -c 'import jax, sys; jax.default_backend() == "gpu" or sys.exit("error: jax sees no GPU here")'
	@XLA_PYTHON_CLIENT_ALLOCATOR=platform $(RUN) -m pytest -m gpu -n $(GPU_JOBS) --durations=10 $(ARGS)

mutants: $(TEST)
	@$(RUN) tests/mutants.py $(ARGS)

chaos: $(TEST)
	@$(RUN) -m tests.chaos --kills 200 --rounds 5 $(ARGS)

chaos-short: $(TEST)
	@$(RUN) -m tests.chaos --kills 30 --rounds 1 $(ARGS)

lint: $(DEV)
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy
	@$(RUN) -m codespell_lib

amd: $(TRITON)
	@$(RUN) -m hybrid_jax.kernels.aot --jobs $(JOBS) $(ARGS)

bench: $(BASE)
	@$(RUN) -m hybrid_jax.bench $(ARGS)

clean:
	rm -rf .venv .venv-* build *.egg-info .pytest_cache .ruff_cache .mypy_cache .amd_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call install,WHAT): with the constraints that suit the environment's Python, which has no jax after 0.10 when it is 3.11.
define install
@constraints="$(CONSTRAINTS)"; \
if [ -z "$$constraints" ]; then constraints=constraints/jax-0.$$($(RUN) -c 'import sys; print(10 if sys.version_info < (3, 12) else 11)').txt; fi; \
echo "installing $(1) into $(VENV) with $$constraints"; \
$(RUN) -m pip install -q --disable-pip-version-check -c "$$constraints" -e '$(1)' && touch $@
endef

$(VENV)/.base: pyproject.toml $(wildcard constraints/*.txt) $(REBUILD)
	@python=; for p in $(PYTHON); do \
	  if "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$p; break; fi; done; \
	if [ -z "$$python" ]; then \
	  echo "error: none of '$(PYTHON)' runs and is 3.11 or newer; name one with PYTHON=/path/to/python" >&2; exit 1; fi; \
	if [ -e "$(VENV)" ] && [ ! -e "$(VENV)/pyvenv.cfg" ]; then \
	  echo "error: VENV=$(VENV) is there and is no environment; name another" >&2; exit 1; fi; \
	if ! "$(RUN)" -c '' 2>/dev/null; then \
	  echo "building $(VENV) from $$("$$python" --version)"; \
	  rm -rf "$(VENV)"; \
	  "$$python" -m venv "$(VENV)" || { rm -rf "$(VENV)"; \
	    echo "error: $$python cannot make an environment (on Debian: apt install python3-venv)" >&2; exit 1; }; \
	fi
	$(call install,.)

$(VENV)/.none:
	@echo "error: this machine has neither an AMD nor an NVIDIA GPU driver" >&2; exit 2

$(VENV)/.%: $(VENV)/.base
	$(call install,.[$*])
