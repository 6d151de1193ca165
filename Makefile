# Two commands matter: `make conformance` and `make test`. Each sets up what it needs in .venv and nowhere else.
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
JOBS   ?= 2

.PHONY: conformance test peers docs docs-check lint regen schedules real-models fuzz bench gpu clean

conformance: $(VENV)/.stamp peers
	@$(PY) -m statescan.conformance run --all --profile quick

test: $(VENV)/.stamp
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy
	@$(PY) -m pytest -q -n $(JOBS)

# What `make conformance` runs beside fla-core. Of causal-conv1d and mamba-ssm there are only source distributions, whose
# builds want CUDA: they are installed without it. One that cannot be installed is reported as "not installed".
peers: $(VENV)/.stamp
	@peer() { $(PY) -c "import importlib.util as u; raise SystemExit(u.find_spec('$$1') is None)" || \
	  { shift; $(PY) -m pip install -q --no-compile "$$@" 2>/dev/null; } || echo "$$1 could not be installed: it will be left out"; }; \
	export CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE CAUSAL_CONV1D_FORCE_BUILD=TRUE \
	       MAMBA_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE; \
	peer causal_conv1d causal-conv1d==1.7.0 --no-deps --no-build-isolation; \
	peer mamba_ssm mamba-ssm==2.3.2.post1 --no-deps --no-build-isolation; \
	peer transformers 'transformers>=5.24,<6'

docs: $(VENV)/.stamp
	@$(VENV)/bin/sphinx-build -q -W --keep-going -c docs spec docs/_build/html
	@echo 'site: docs/_build/html/index.html'

# With Debian's chromium and chromium-driver: every page of the built site in a browser.
docs-check: docs
	@$(PY) docs/check_site.py $(if $(EVERY),--every $(EVERY))

lint: $(VENV)/.stamp
	@$(VENV)/bin/ruff check . && $(VENV)/bin/mypy

regen: $(VENV)/.stamp
	@$(PY) -m statescan.conformance regen --check

# Files and answers from outside that nobody meant well, each to end in a result or in an error of ours.
fuzz: $(VENV)/.stamp
	@$(PY) -m statescan.conformance.fuzz $(or $(COUNT),100000)

# Random schedules of an engine's bookkeeping and of every mixer, each request as alone, and all small programs; stopped
# and started again it goes on where it was.
schedules: $(VENV)/.stamp
	@$(PY) -m statescan.conformance schedules --engine reference --mixer all --count $(or $(COUNT),10000) --jobs $(JOBS)
	@$(PY) -m statescan.conformance.schedule_programs
	@$(PY) -m statescan.conformance schedules --mixer all --count $(or $(COUNT),10000) --jobs $(JOBS)

# Public architectures of the transformers package with our mixers in the place of their own, at a small size.
real-models: $(VENV)/.stamp peers
	@$(PY) -W ignore tests/real_models/check.py $(if $(JSON),--json $(JSON))

# On a machine with a GPU: what WHAT="conv prefill" or the like names, or everything.
bench: $(VENV)/.stamp
	@$(PY) -m statescan.fast.bench.bench $(if $(WHAT),"$(WHAT)")

gpu: $(VENV)/.stamp
	@$(PY) -m statescan.fast.bench.check_gpu

clean:
	rm -rf $(VENV) reports docs/_build

# A torch or triton that is already installed is used as it is, and never fetched a second time; pip's own settings apply.
$(VENV)/.stamp: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 10) <= v < (3, 14) else f"statescan needs Python 3.10 to 3.13; {sys.executable} is {v[0]}.{v[1]}. Set PYTHON=...")'
	@test -x $(PY) || $(PYTHON) -m venv $$($(PYTHON) -c 'import torch' 2>/dev/null && echo --system-site-packages) $(VENV)
	@have() { $(PY) -c "import importlib.util as u; raise SystemExit(u.find_spec('$$1') is None)"; }; \
	extras=dev; have torch || extras=$$extras,torch; have triton || extras=$$extras,triton; \
	echo "installing statescan[$$extras] into $(VENV)"; \
	$(PY) -m pip install -q --no-compile setuptools wheel ninja packaging -e ".[$$extras]"
	@touch $@
