# The two commands of a fresh machine are `make quickstart` and `make test`; each installs what it needs into .venv.
# PYTHON=/path/to/python3 chooses the interpreter, TORCH=torch==... the torch build (see scripts/torch).

.PHONY: help quickstart install test test-clients test-bf16 test-browser test-vllm test-harnesses test-runs test-wheel test-hostile test-chaos beside-check beside-test test-pythons test-pretrained wheelhouse lock pictures docs probe-sdk compatibility check bench clean
export PYTHON TORCH CHROMIUM

help:            ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' Makefile | expand -t 16

quickstart:      ## install, then train the built-in model: the reward rises within two minutes
	@scripts/install
	@.venv/bin/halteres quickstart

install:         ## .venv with Halteres in it
	@scripts/install
	@echo "Installed. Next: .venv/bin/halteres --help"

test:            ## install what tests need; format, lint, types, tests
	@scripts/install dev
	@$(MAKE) --no-print-directory --jobs 2 beside-check beside-test

beside-check:
	@scripts/check
beside-test:
	@scripts/test

test-clients:    ## third-party clients in environments of their own
	@scripts/install dev
	@scripts/test-clients

probe-sdk:       ## the newest tinker SDK on the package index against the service: green or red
	@scripts/install dev
	@scripts/probe-sdk

compatibility:   ## probe every SDK method and generation; write docs/compatibility.md
	@scripts/install dev
	@scripts/compatibility

test-runs:       ## whole runs and trainings, tests of inference, the engine's long tests; the tutorial among them
	@scripts/install dev
	@scripts/test -n 3 -m "runs and not hostile"

test-chaos:      ## kill every process of real runs in turn
	@scripts/install dev
	@scripts/test -n 3 -m chaos

test-bf16:       ## the engine's tests of behaviour once more, its base weights in bfloat16
	@scripts/install dev
	@scripts/test-bf16

test-browser:    ## the page in a real browser
	@scripts/install dev
	@scripts/test-browser

test-vllm:       ## a real vLLM on the CPU samples for the service; its environment (3.5 GB) is made once
	@scripts/install dev
	@scripts/test-vllm

test-harnesses:  ## unmodified agent harnesses sample from the service (docs/works-with.md); needs Python 3.12 for verifiers
	@scripts/install dev
	@scripts/test-harnesses

test-wheel:      ## the wheel in a fresh environment, without the repository: quick start, page, service
	@scripts/install dev
	@scripts/test-wheel

test-hostile:    ## two hundred hostile answers to each task that evaluates them, and to the Python tool (half an hour)
	@scripts/install dev
	@scripts/test -m hostile

test-pythons:    ## the rooms that need no torch, on the newest Python that is installed
	@scripts/test-pythons

test-pretrained: ## fetch a pretrained model of 135 M parameters (98 MB), register its GGUF file, train it for a few steps
	@scripts/install dev
	@scripts/test-pretrained

check:           ## format, lint, types
	@scripts/install dev
	@scripts/check

bench:           ## one on-policy RL step, here and in TRL, in one invocation
	@scripts/install dev
	@.venv/bin/python benchmarks/rl_step.py

wheelhouse:      ## wheels for a machine without network, and the command that installs them there (docs/install.md)
	@scripts/install dev
	@scripts/wheelhouse

docs:            ## these pages as a site in build/site; a link that leads nowhere is an error
	@scripts/install dev
	@scripts/docs

lock:            ## write constraints.txt: the versions that are installed here
	@scripts/install dev
	@scripts/lock

pictures:        ## make README's pictures, from a run of their own
	@scripts/install dev
	@scripts/pictures

clean:           ## remove what the other targets made
	rm -rf .venv .venvs wheelhouse .pytest_cache .ruff_cache build dist
