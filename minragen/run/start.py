"""Put a run together: learner, groups and log, in one place; and the command `minragen.train`.

    learner, groups, log = start(config)
    train(learner, groups, config, log)

Most of the reading list runs as one reads it. These functions have others in their places:

    read here               runs there               when                       proved by (tests/)
    rollout.collect         fast/scheduler.py        rows would wait            test_rows.py
    cache.last_hidden       fast/llama.py            Llama's family             test_attention.py
                            fast/graphs.py           Llama's, on CUDA           test_rows.py
    rollout.sample_replies  fast/sampling.py         Llama's, on CUDA           test_rows.py
    cache.regather          fast/sampling.py         where flash.py runs        test_rows.py
    cache.hidden_before,    fast/prefix_tree.py      Llama's family, without    test_attention.py
    cache.micro_batches                              another --attention
    a decoder's layers      torch.compile            Llama's: --compile on, or  test_attention.py
                                                     100 or more steps on CUDA
    attention with masks    fast/flash.py            Llama's, in bfloat16 on    test_attention.py
                                                     CUDA
    models.output_layer,    fast/head.py             bfloat16 on CUDA           test_attention.py
    models.token_logprobs
    EnvGroups: one by one   run/groups.py: threads   environments that wait     test_envs.py
    train.World: alone      run/distributed.py       --nproc, torchrun          test_distributed.py

    cache.last_hidden       more/hybrid.py           layers with states          test_hybrid.py
    models.load_policy      run/load.py              always: it refuses models  test_models.py
    EnvGroups: may raise    run/groups.py            always: episodes may fail  test_envs.py
    train.Callbacks         run/log.py               always: it keeps files     test_runs.py

Those above the gap are only faster: `--plain true` turns them off, and starts one process unless
more are asked for. Then results are the same up to rounding (test_train.py::TestPlain). Those
below do more.

Reading order: `run` (from the start to the report), `start`, `build_groups`, `load`,
`build_learner`; last `main` (the command).

Tests: `python -m pytest tests/test_train.py tests/test_runs.py`.
"""

import gc
import pkgutil
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path

import torch

from minragen import config as settings
from minragen import rollout, starpo
from minragen.chat import ChatFrame
from minragen.envs import SPLITS
from minragen.fast.policies import compile_layers, faster
from minragen.look.faults import Console, Failure
from minragen.models import AdamW, Critic
from minragen.rollout import first_prompt
from minragen.run import bundled, distributed, memory, runs
from minragen.run.command import opening_line
from minragen.run.groups import check_environments, collect, env_groups, shows_images
from minragen.run.load import load_policy
from minragen.run.log import Log
from minragen.run.proof import prove
from minragen.support.formats import description_parts
from minragen.support.options import short
from minragen.train import TRAIN_SEED, Learner, rules_of, train


def further(module, name, *given):
    """Call an entry of ROWS in more/estimators.py or more/filters.py, imported only when used."""
    return pkgutil.resolve_name(f"minragen.more.{module}:ROWS")[name](*given)


# What --advantages and --filter may name beside the rows of starpo.py.
starpo.ESTIMATORS |= {name: (kind, partial(further, "estimators", name)) for name, kind in (
    ("brpo", "group"), ("maxrl", "group"), ("gigpo", "group"), ("bi_level_gae", "critic"),
    ("turn_gae", "critic"))}
starpo.FILTERS |= {name: partial(further, "filters", name)
                   for name in ("top_p_softmax", "top_k_abs", "min_p")}


def run(config, resume=False, say=print):
    """Train in runs/NAME and write the report. Returns the metrics of the test, None if SIGTERM or
    Ctrl-C stopped it.

    raises: ValueError for a taken name, a damaged checkpoint, a prompt that fills the context;
        OSError for a full disk
    """
    learner, groups, log = start(config, resume, say)
    with log:
        say(f"run       {log.folder}: metrics.jsonl, trajectories.jsonl, checkpoint/; then "
            f"report.html")
        try:
            final = train(learner, groups, config, log)
        except torch.OutOfMemoryError as error:
            raise RuntimeError(f"{learner.policy.device} is out of memory. By the forecast "
                               f"{memory.remedies(learner, config)}.") from error
    if log.writes:
        say(last_line(log, ended=final is not None))
    return final


def start(config, resume=False, say=print):
    """The Learner, {split: EnvGroups} and the Log of a run, new or resumed."""
    world = distributed.world()
    folder = world.gather(runs.run_folder(config, resume) if world.rank == 0 else None)[0]
    groups = build_groups(config)
    learner = build_learner(config, groups, folder if resume else None, say)
    return learner, groups, Log(folder, config, learner, resume, say)


def build_groups(config):
    """{split: EnvGroups} of this process's share, built once: for train P groups of G episodes,
    for val and test val_size groups of one.

    Episodes are dealt out one by one, so that all processes play equally hard instances.
    """
    world = distributed.world()
    if config.num_groups * config.group_size < world.size:
        raise ValueError(f"num_groups: got {config.num_groups} of {config.group_size} episodes, "
                         f"expected at least one episode for each of the {world.size} processes.")
    sizes = {"train": (config.num_groups, config.group_size, config.env)}
    share = slice(world.rank, None, world.size)
    return {split: env_groups(config, split, *sizes.get(split, (config.val_size, 1, "")), share,
                              paid=split == "train") for split in SPLITS}


def load(config, checkpoint="", say=print):
    """The policy of a checkpoint, or the one that a run of this Config begins with, and its
    ChatFrame, which checks that turns appended one by one equal the whole chat rendered."""
    device = bundled.choose_model(config.model, config.device)[1]
    source = checkpoint or bundled.resolve(
        config.model, partial(env_groups, config), config.response_format, config.max_new_tokens,
        config.warmup_steps, device, say, config.example, config.lora_rank)
    stored_dtype = checkpoint or config.model in bundled.BUNDLED
    policy = policy_of(config, source, device, stored_dtype, config.model,
                       lambda: shows_images(env_groups(config, "train")))
    if hasattr(policy.model, "image_store") and policy.image_store is None:
        say(f"model     {short(config.model)} reads text only: its vision tower is frozen")
    return policy, frame_of(config, policy, policy.model.generation_config.eos_token_id)


def policy_of(config, *given):
    """`load_policy`, then the decoder and attention of fast/, unless `--plain`."""
    policy = load_policy(*given)
    return policy if config.plain else faster(
        policy, config.attention, config.max_context + config.max_new_tokens)


def frame_of(config, policy, model_eos=None):
    """A Config's ChatFrame. It checks that appended turns equal the whole chat rendered."""
    kind = ChatFrame
    if config.echo_coef:
        from minragen.more.echo import EchoFrame as kind
    elif config.context != "full":
        from minragen.more.windows import WindowedFrame

        kind = partial(WindowedFrame, context=config.context, window=config.window)
    return kind(policy.tokenizer, config.response_format, model_eos, config.max_new_tokens,
                policy.image_store, config.example)


def build_learner(config, groups, checkpoint_of=None, say=print):
    """The Learner of a new run, or of a checkpoint if the folder of a run is given."""
    device = bundled.choose_model(config.model, config.device)[1]
    distributed.use_cores(  # of which more than one does not pay for a tiny model
        one=config.model in bundled.TINY_MODELS and device.type == "cpu")
    begun = checkpoint_of or config.init_from and runs.RUNS / config.init_from
    checkpoint = begun and runs.find_checkpoint(begun, say)
    with distributed.main_process_first():  # the warm-up fills the cache
        policy, frame = load(config, checkpoint, say)
    if config.tis_cap and not config.stale and policy.model.dtype == torch.float32:
        raise ValueError("tis_cap: it has no effect here. In float32 without --stale, sampler and "
                         "learner have the same logprobs, so all importance weights are 1.")
    if config.lora_rank:
        from minragen.more.lora import add_adapters

        add_adapters(policy, config.lora_rank, config.seed)
    firsts = {split: held.reset(TRAIN_SEED if split == "train" else 0)  # observations
              for split, held in groups.items()}
    if policy.image_store:
        policy.image_store.expect(firsts["train"])
    compile_layers(policy, "off" if config.plain else config.compile, config.steps)
    say(f"proved    {prove(policy, config.max_context)}")
    check_first_prompts(config, frame, groups, firsts)
    learner = Learner(policy, frame, AdamW(policy.model.parameters(), config.lr),
                      collect=rollout.collect if config.plain else collect,
                      world=distributed.world())
    if starpo.ESTIMATORS[config.advantages][0] == "critic":
        learner.critic = Critic(policy)
        if policy.image_store:
            from minragen.more.vision import with_tower

            learner.critic = with_tower(learner.critic)
        learner.critic_optimizer = AdamW(learner.critic.parameters(), config.critic_lr)
    if config.kl_coef > 0 or config.kl_reward_coef > 0:
        learner.reference = teacher_of(config, policy) if config.teacher else policy.frozen()
    if config.stale:
        from minragen.more.stale import OlderWeights

        learner.rollout_context = OlderWeights(policy, config.stale)
    if config.activation_checkpointing:
        for module in filter(None, (policy.model, learner.critic)):
            memory.checkpoint_activations(module)
    if checkpoint_of:
        runs.load_trainer_state(checkpoint, learner)
        say(f"resumed   after step {learner.step}")
    say(memory.forecast(learner, config))
    return learner


def teacher_of(config, policy):
    """The policy of the run or model `config.teacher`, without gradients. Raises ValueError unless
    it reads the same tokens as `policy`."""
    name, run = config.teacher, runs.RUNS / config.teacher
    if policy.image_store:
        raise ValueError(f"teacher: {policy.name!r} sees images, which a teacher does not.")
    is_run = runs.RUN_NAME.fullmatch(name) and run.is_dir()
    is_model = name == "smollm2" or "/" in name or Path(name).is_dir()
    found = bundled.source_of(name) if is_model and not is_run else runs.find_checkpoint(run)
    teacher = policy_of(config, found, policy.device, True, name, lambda: False)
    if teacher.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise ValueError(f"teacher {name!r}: its tokenizer is another one than that of "
                         f"{policy.name!r}, so its logprobs are of other tokens.")
    teacher.model.requires_grad_(False)
    return teacher


def check_first_prompts(config, frame, groups, firsts):
    """Raise ValueError for a context that a first prompt already fills; RuntimeError for an
    environment whose reset fails."""
    for split, held in groups.items():
        for row, observation in enumerate(firsts[split]):
            if (t := first_prompt(frame, held, row, observation, rules_of(config))).error:
                cause = Failure(t.error)
                cause.fault = t.fault
                raise RuntimeError(f"{t.env} cannot be reset: {t.error}") from cause


def last_line(log, ended):
    """What to do next. Writes the report of a run that has ended."""
    name = log.folder.name
    if not ended:
        return f"stopped   after step {log.learner.step}. Go on with: make resume RUN={name}"
    from minragen.look import report

    report.write([log.folder])
    return f"done      {log.folder}/report.html; measure it again with: make eval RUN={name}"


# ---- The command ---------------------------------------------------------------------------------
def main(argv=None, begun=False):
    """Train, or print one sentence that says why not. begun: the first line has been printed."""
    if argv is None:  # torchrun starts it so
        Console.take_over()
    say = print
    try:
        config, resume, show, why = asked_for(sys.argv[1:] if argv is None else argv)
        if show:
            if distributed.rank() == 0:
                print(show)
            return
        say = distributed.begin(bundled.choose_model(config.model, config.device)[1])
        if not begun:
            say(opening_line(config, resume, distributed.world_size()))
        say(f"model     {why}")
        say(f"settings  {settings.summary(config)}")
        gc.freeze()  # the libraries' objects: to search them for garbage takes 0.2 s each time
        stopped = run(config, resume, say) is None
        distributed.end()
        if stopped:
            sys.exit(130)  # as after an interrupt; a chain of commands must not go on
    except Exception as problem:
        distributed.fail(problem)
    except KeyboardInterrupt:
        say("\nstopped. If the run has a checkpoint, --run NAME --resume continues it.")
        sys.exit(130)


def asked_for(argv):
    """What a command line asks for: Config, whether to resume, the settings as text if they are to
    be printed only, and why it is this model, with the environments' backends."""
    given = settings.parse(argv)
    resume, show = given.pop("resume"), given.pop("print_config")
    if resume:
        config = runs.resumed_config(given)
        why = f"{short(config.model)} as the run began"
    else:
        model = given.get("model", "")
        if not model and given.get("init_from"):
            model = runs.load_config(given["init_from"]).model
        model, _, why = bundled.choose_model(model, given.get("device", ""))
        config = settings.from_options({**given, "model": model})
    if config.log:
        from minragen.more import loggers

        loggers.check(config.log)  # before anything is printed
    groups = check_environments(config)
    why += "".join(f"; {name} uses {env.backend}"
                   for name, env in zip(groups.names, groups.envs) if env.backend)
    return config, resume, show and explained(config, given, resume), why


def explained(config, given, resumed=False):
    """All settings as text: what differs from the defaults, and what set it; then the rest."""
    sources = {"the stored run": vars(config)} if resumed else settings.sources_of(
        config.env, config.algo, config.model, config.response_format)
    if not resumed and description_parts(config.response_format):
        sources[f"env {config.env} and format {config.response_format}"] = settings.EXTRA_PER_PART
    sources["you"] = given
    own = f"env {config.env} and model {short(config.model)}"
    lines = [f"{own}, algo {config.algo}: what differs from the defaults"]
    rest = ["", "the rest are the defaults"]
    for f in (f for f in fields(config) if f.name not in ("env", "algo", "model")):
        value = getattr(config, f.name)
        line = f"{f.name.replace('_', '-'):22} {value!r:14}"
        through = [own, *(source for source, options in sources.items() if f.name in options)]
        if value == f.default:
            rest.append(line.rstrip())
        else:
            lines.append(f"{line} default {f.default!r:14} set by {through[-1]}")
    return "\n".join(lines + rest)
