# make demo | test | sweep | sanitize | lint | docs | site    Each makes $(VENV) first, if it is not there.
# Another torch: make test TORCH=torch==2.11.0 VENV=.venv211

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help demo test sweep sanitize lint ruff types docs site site-serve clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   trains a small transformer under every recipe and compares (results in demo_out/)"
	@echo "make test   lint and tests"
	@echo "make sweep  more cases of the slow tests"
	@echo "make sanitize  the Triton kernels under compute-sanitizer (needs a GPU; TOOL=racecheck, initcheck)"
	@echo "make lint   ruff and mypy"
	@echo "make docs   regenerates the tables in README.md and docs/"
	@echo "make site   builds the pages with a reference of all names, in build/site; make site-serve shows them"
	@echo "make clean  removes $(VENV) and everything that was built"

demo: $(VENV)/.demo
	@echo "==> training under every recipe"
	@$(BIN)/python docs/demo/train.py

# mypy takes one core: before the tests it would leave the others idle. Its output comes after theirs.
test: ruff $(VENV)/.test
	@echo "==> running the tests, and mypy beside them"
	@mkdir -p build; $(MAKE) --silent types >build/types.txt 2>&1 & types=$$!; \
		OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal; tests=$$?; \
		wait $$types; types=$$?; cat build/types.txt; exit $$((tests + types))

sweep: $(VENV)/.test
	@echo "==> running the tests that take long"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m sweep

TOOL ?= memcheck
sanitize: $(VENV)/.test
	@echo "==> running the kernels under compute-sanitizer $(TOOL)"
	@PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $(TOOL) --target-processes all --error-exitcode 1 \
		$(BIN)/python tests/gpu/sanitize.py

lint: ruff types

ruff: $(VENV)/.lint
	@echo "==> ruff"
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/.lint
	@echo "==> mypy"
	@rm -rf build/types && mkdir -p build/types/fxquant
	@ln -s $(CURDIR)/fxquant/* $(CURDIR)/passes $(CURDIR)/kernels build/types/fxquant/
	@MYPYPATH=build/types $(BIN)/mypy

docs: $(VENV)/.demo
	@echo "==> regenerating tables"
	@$(BIN)/python docs/tables.py

site: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "==> build/site/index.html"

site-serve: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

clean:
	rm -rf $(VENV) build dist demo_out *.egg-info

# torch first and pinned, so that no other requirement chooses one; a venv that has a usable one keeps it
HAS_TORCH := import torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)

$(VENV)/.torch:
	@test -x $(BIN)/python || { echo "==> making $(VENV)"; $(PYTHON) -m venv $(VENV); }
ifeq ($(origin TORCH),file)
	@$(BIN)/python -c '$(HAS_TORCH)' 2>/dev/null || { echo "==> installing $(TORCH)"; $(PIP) "$(TORCH)"; }
else
	@echo "==> installing $(TORCH)"; $(PIP) "$(TORCH)"
endif
	@touch $@

$(VENV)/.demo: EXTRAS := demo
$(VENV)/.test: EXTRAS := demo,test,corpus,trainers,docs,browser
$(VENV)/.docs: EXTRAS := docs
$(VENV)/.lint: EXTRAS := lint
$(VENV)/.demo $(VENV)/.test $(VENV)/.docs $(VENV)/.lint: $(VENV)/.torch pyproject.toml
	@echo "==> installing fxquant[$(EXTRAS)]"
	@$(PIP) -e ".[$(EXTRAS)]"
	@touch $@
