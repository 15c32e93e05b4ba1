# Everything starts from here, on a machine with nothing but git and make: scripts/bootstrap.sh, which every target
# runs first, installs what is missing and does nothing when nothing is.

.DEFAULT_GOAL := help
# One at a time: the targets share a virtual environment and write to one terminal.
.NOTPARALLEL:

VENV ?= .venv
export AIORDMA_VENV := $(VENV)
BOOTSTRAP := scripts/bootstrap.sh
# tox makes its environments on the Python that bootstrap.sh chose.
TOX = AIORDMA_PYTHON="$$(cat $(VENV)/.aiordma/python)" $(VENV)/bin/tox run

# Arguments for the program that a target runs: make bench ARGS="--quick", make test ARGS="-e lint"
ARGS ?=

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-19s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: ## build the package and install it into .venv
	@$(BOOTSTRAP) package

.PHONY: develop
develop: ## the same as an editable install, which rebuilds itself when imported
	@$(BOOTSTRAP) develop

.PHONY: demo
demo: build ## run examples/demo.py on the emulated NIC (FILE=path: a file of yours to transfer)
	@$(VENV)/bin/python examples/demo.py $(if $(FILE),"$(FILE)") $(ARGS)

.PHONY: bench
bench: build ## run the benchmarks and write docs/performance.md (ARGS="--quick": two minutes; UCX=1: with ucxx)
	@$(BOOTSTRAP) bench
	@$(if $(UCX),$(BOOTSTRAP) bench-ucx)
	@$(VENV)/bin/python benchmarks/bench.py $(ARGS)

.PHONY: bench-instructions
bench-instructions: build ## count the instructions of an operation, and hold them against what is recorded
	@$(VENV)/bin/python benchmarks/instructions.py $(ARGS)

.PHONY: test
test: tools ## run every check: lint, types, docs, C tests under sanitizers, tests, a VM's too (ARGS="-e NAME": one of them)
	@mkdir -p build && rm -f build/tox.json
	@$(TOX) --result-json build/tox.json $(ARGS) || { $(VENV)/bin/python scripts/failures.py build/tox.json; exit 1; }

.PHONY: docs
docs: tools ## build the documentation into docs/_build/html
	@$(TOX) -e docs

.PHONY: format
format: tools ## put the Python code into the project's format
	@$(TOX) -e format

.PHONY: tools
tools:
	@$(BOOTSTRAP) tools

.PHONY: clean
clean: ## remove everything that was built, the virtual environment too
	[ ! -d "$(VENV)/.aiordma" ] || rm -rf "$(VENV)"
	rm -rf .tox build dist docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find aiordma tests examples benchmarks scripts docs -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
