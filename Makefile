# Two commands: `make demo` and `make test`. Each sets up its own .venv on a fresh machine; a second run is quick.
#
# Without an NVIDIA driver, one fixed torch and triton are installed first: they suffice to compile for every GPU
# and to compute on the CPU. triton has a step of its own: some builds of torch ask for another one.

PYTHON ?= python3
JOBS   ?= 2
VENV   := .venv
BIN    := $(VENV)/bin

HAS_DRIVER := $(shell test -e /proc/driver/nvidia/version || nvidia-smi -L >/dev/null 2>&1 && echo yes)
TORCH      := $(if $(HAS_DRIVER),torch,torch==2.13.0)
TRITON     := $(if $(HAS_DRIVER),triton,triton==3.6.0)
NEWEST     := triton==3.9.0
PIP        := -m pip --disable-pip-version-check install --quiet

.PHONY: demo test lint types newest wheel clean

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py

test: lint types
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal tests/interpreter

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	PATH="$(CURDIR)/$(BIN):$$PATH" .ci/typecheck

# The corpus once more, whole, with the newest Triton that is supported, in an environment laid over the first one.
newest: .venv-newest/.ready
	.venv-newest/bin/python -m pytest -n $(JOBS) --dist worksteal --whole-corpus tests/compile

# The wheel, installed into an empty environment and used from another folder.
wheel: $(VENV)/.dev
	rm -rf dist build .venv-wheel
	$(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir dist .
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python $(PIP) $(TORCH)
	.venv-wheel/bin/python $(PIP) '$(TRITON)'
	.venv-wheel/bin/python $(PIP) dist/*.whl
	cd /tmp && FLEXC_CACHE_DIR="$(CURDIR)/.venv-wheel/cache" \
	    "$(CURDIR)/.venv-wheel/bin/python" "$(CURDIR)/.ci/smoke.py"
	cd /tmp && "$(CURDIR)/.venv-wheel/bin/flexc" doctor

clean:
	rm -rf .venv .venv-newest .venv-wheel .typecheck build dist *.egg-info demo-output
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.demo: pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) $(TORCH)
	$(BIN)/python $(PIP) '$(TRITON)'
	$(BIN)/python $(PIP) --editable '.[plot]'
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(BIN)/python $(PIP) --editable '.[dev,plot]'
	touch $@

# `addsitedir` makes the packages of .venv visible behind the new environment's own, where the other Triton is.
.venv-newest/.ready: $(VENV)/.dev
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python $(PIP) --no-deps '$(NEWEST)'
	site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	own=$$(.venv-newest/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	echo "import site; site.addsitedir('$$site')" > "$$own/zz-base.pth"
	touch $@
