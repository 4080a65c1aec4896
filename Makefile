# Everything runs in .venv; `make setup` makes it.
PYTHON := .venv/bin/python

.PHONY: help setup test slow lint format types ci

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: ## make .venv and install everything, editable
	python3 -m venv .venv
	.venv/bin/pip install -c constraints.txt -e '.[test]' --config-settings editable_mode=strict

test: ## the default tests
	$(PYTHON) -m pytest

slow: ## the full matrix of models x forms
	$(PYTHON) -m pytest -m slow

lint: ## what ruff says
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

format: ## let ruff write
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

types: ## mypy --strict over the package
	.venv/bin/mypy

ci: ## what every change must pass
	.ci/run
