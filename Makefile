# Every target works from a bare checkout: the environment is made on first use
# and again when the package's requirements change.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

# The pins hold inside pip's isolated builds too; newer versions of pip read the second name.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(PIP_CONSTRAINT)

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow check bench same-bits trace readme clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile

demo: $(READY) ## Learn ten permuted-digit tasks: fine-tuning, GPM and TRGP, three seeds
	@$(BIN)/python examples/demo.py runs/demo

test: $(READY) ## Run the tests that take a few minutes
	@$(BIN)/python -m pytest -m "not slow" -rs

test-slow: $(READY) ## Run the slow tests: processes, kills, compilers, real images
	@$(BIN)/python -m pytest -m slow -rs

check: $(READY) ## Lint, check the formatting, the types and what imports what
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 0 -q tests/test_contract.py
	$(BIN)/python records/readme.py --check

bench: $(READY) ## Time the core operations
	$(BIN)/python bench/core.py

same-bits: $(READY) ## Print digests of short runs; WRITE=file keeps them, COMPARE=file compares
	$(BIN)/python tools/same_bits.py $(if $(WRITE),--write $(WRITE)) $(if $(COMPARE),--compare $(COMPARE))

trace: $(READY) ## Count the modules and frames between a command and the formula
	$(BIN)/python tools/reading_path.py

readme: $(READY) ## Write the tables and figures of README and docs from the records
	$(BIN)/python records/readme.py

clean: ## Remove the environment, the caches and the build products
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find src tests tools examples bench records -name __pycache__ -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP_INSTALL) --editable '.[dev]'
	touch $@
