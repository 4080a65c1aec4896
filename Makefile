# Everything runs in .venv; `make setup` makes it.
PYTHON := .venv/bin/python

# A line for each model and group of steps, with its commit, kept beside the table that is made of them: remove the files to begin anew.
RESULTS := docs/coverage

.PHONY: help setup test slow zoo coverage lint format types ci

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: ## make .venv and install everything, editable
	python3 -m venv .venv
	.venv/bin/pip install -c constraints.txt -e '.[test]' --config-settings editable_mode=strict

test: ## the default tests
	$(PYTHON) -m pytest

slow: ## the full matrix of models x forms
	$(PYTHON) -m pytest -m slow

zoo: ## find, warm start and a sample of ONNX on hundreds of architectures; ZOO_SHARD=K/N for a part, ZOO_WHOLE=0/12 in a third of the time
	$(PYTHON) -m pytest -m zoo --dist load tests/zoo

coverage: ## the zoo through every step, written to docs/coverage.md; goes on where it stopped
	$(PYTHON) tests/zoo/zoo_sweep.py $(RESULTS)-0.jsonl --shard 0/2 & \
	$(PYTHON) tests/zoo/zoo_sweep.py $(RESULTS)-1.jsonl --shard 1/2; wait
	$(PYTHON) tests/zoo/zoo_report.py docs/coverage.md $(RESULTS)-0.jsonl $(RESULTS)-1.jsonl

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
