# `make up` shows the layer working, `make test` proves it; `make help` lists the rest.
.DEFAULT_GOAL := help
.PHONY: help setup up down test check format bench torture clean

PYTHON := .venv/bin/python
WORKERS ?= 3
ARGS ?=

help:  ## list these commands
	@sed -n 's/^\([a-z]*\):.*  ## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

setup:  ## install what is missing (Debian packages, .venv/); quick when nothing is
	@tools/setup.sh $(NEEDS)

test check torture: NEEDS := test
bench: NEEDS := test bench

up: setup  ## a layer in demo/ with a help desk in it, and a server; says what to do next
	@$(PYTHON) tools/up.py demo

down:  ## stop the server that `make up` has started
	@$(PYTHON) tools/up.py down demo

test: setup  ## run the tests, on both engines where they may differ; ARGS="-k fork" narrows it
	@$(PYTHON) -m pytest -n $(WORKERS) $(ARGS)

check: setup  ## format, lint, types, import directions
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .
	@.venv/bin/mypy
	@$(PYTHON) -m pytest -q tests/test_imports.py

format: setup  ## rewrite the code in the project's format
	@.venv/bin/ruff format .
	@.venv/bin/ruff check --fix .

bench: setup  ## measure both engines against a plain table and DoltLite, then boxes against bwrap and OCI runtimes
	@$(PYTHON) -m bench $(ARGS)
	@$(PYTHON) -m bench.boxes $(BOXES)
	@$(PYTHON) -m bench.law
	@$(PYTHON) -m bench.edges
	@$(PYTHON) -m bench.agents
	@$(PYTHON) -m bench.bundles
	@$(PYTHON) -m bench.why

torture: setup  ## kill -9, concurrency and fuzzing campaigns; takes minutes to hours
	@$(PYTHON) -m pytest -m torture $(ARGS)

clean: $(if $(wildcard demo/server.pid),down)  ## remove what was installed here, caches and the demo
	@rm -rf .venv .venvs tests/node/node_modules .setup.lock .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info demo
