"""Training on an accelerator: the CPU's numbers, no tensor left behind, and few waits. Shown on
`pretend:0` (accelerator.py lists what that cannot show) and, where there is one, on a GPU."""

import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import math
import tempfile
import warnings
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file
from toys import tiny

from lab import gpu
from minragen import train as trainer
from minragen.config import preset
from minragen.envs import EnvGroups
from minragen.fast import graphs, sampling
from minragen.fast.policies import faster
from minragen.look import diagnostics
from minragen.more.windows import WindowedFrame
from minragen.rollout import Rules, collect
from minragen.run import bundled, proof, start
from minragen.run.load import load_policy
from minragen.run.log import without_times
from minragen.trajectory import make_batch

SMALL = tempfile.TemporaryDirectory()  # of an untrained policy of two layers
LOTTERY = dict(model=SMALL.name, warmup_steps=0, num_groups=2, group_size=3, max_new_tokens=6,
               max_context=160, max_turns=2, mini_batch=3, val_size=1, steps=2, seed=3, lr=1e-3)
LAKE = dict(env="frozenlake", model="tiny", filter="none", num_groups=2, group_size=2,
            lr=1e-3)  # with the bundled weights
KL = dict(kl_coef=0.1, kl_reward_coef=0.1)
DEVICES = ["pretend:0", *["cuda"] * torch.cuda.is_available()]
LORA = [0, pytest.param(4, marks=pytest.mark.skipif(not find_spec("peft"), reason="no peft"))]


def pretend_device():
    """Imported late, so that collecting this file registers no device."""
    from accelerator import PretendDevice
    return PretendDevice()


@functools.cache
def small():
    """A policy of two layers, which lies in SMALL, and its frame."""
    policy, frame = tiny("toys:Lottery")
    policy = dataclasses.replace(policy, model=copy.deepcopy(policy.model))
    del policy.model.model.layers[2:]
    policy.model.config.num_hidden_layers = 2
    policy.model.save_pretrained(SMALL.name)
    policy.tokenizer.save_pretrained(SMALL.name)
    return policy, frame


@pytest.fixture(autouse=True)
def known(monkeypatch, runs):
    """minRAGEN accepts the device, proves it as briefly as a CPU, and keeps SMALL in float32."""
    small()
    monkeypatch.setattr(bundled, "BUNDLED", (*bundled.BUNDLED, SMALL.name))
    monkeypatch.setattr(bundled, "choose_model",
                        lambda model, device: (model, torch.device(device), ""))
    monkeypatch.setitem(proof.PROOF_BUDGET, "pretend", proof.PROOF_BUDGET["cpu"])


def configured(device, env="toys:Lottery", algo="grpo", **options):
    return dataclasses.replace(preset(env, algo, "tiny"), device=device, **options)


def halved(*arguments, **options):
    policy = load_policy(*arguments, **options)
    policy.model.bfloat16()
    return policy


def on(device):
    return pretend_device() if device.startswith("pretend") else contextlib.nullcontext()


class Diagnosing(trainer.Callbacks):
    """Measures what a run measures, and writes nothing."""

    def __init__(self, config):
        self.config = config

    def diagnose(self, learner, step, played, rows, batch):
        metrics = diagnostics.diagnose(learner, self.config, step, played, ())
        return metrics | diagnostics.diagnose_update(learner, self.config, step, batch)


def step(device, **options):
    """A training step with diagnoses: returns learner, metrics, trajectories, PretendDevice."""
    config = configured(device, gradients_every=1, **options)
    with on(device) as pretend:
        groups = start.build_groups(config)
        learner = start.build_learner(config, groups, say=lambda line: None)
        if pretend:
            pretend.waits.clear()
            pretend.moved.clear()
        found = trainer.train_step(learner, groups["train"], config, Diagnosing(config))
        return learner, *found, pretend


def run(config, resume=False):
    """A whole run. Returns its weights and the lines of metrics.jsonl."""
    with on(config.device):
        start.run(config, resume, say=lambda line: None)
    folder = start.runs.RUNS / config.run
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return load_file(folder / "checkpoint" / "model.safetensors"), [json.loads(x) for x in lines]


def assert_close(ours, theirs, tolerance):
    """Equal metrics, but for times."""
    for name, value in without_times(theirs).items():
        number = isinstance(value, float)
        assert ours[name] == (pytest.approx(value, tolerance, tolerance) if number else value)


class TestDevice:
    """The instrument itself: what it refuses and counts is what PyTorch does on CUDA."""

    @pytest.mark.parametrize("mixed", [
        torch.add, torch.nn.functional.linear, lambda a, b: b.add_(a),
        lambda a, b: a.gather(1, b.long()), lambda a, b: b[a.long()]])
    @pytest.mark.parametrize("inference", [False, True])
    def test_an_operation_on_tensors_of_two_devices_is_refused(self, mixed, inference):
        with pretend_device(), torch.inference_mode(inference):
            with pytest.raises(RuntimeError, match="mixes devices"):
                mixed(torch.ones(2, 2, device="pretend:0"), torch.ones(2, 2))
            mixed(torch.ones(2, 2, device="pretend:0"), torch.ones(2, 2, device="pretend:0"))
            torch.ones(2, device="pretend:0") + torch.tensor(1.0)  # a number may be on the host

    @pytest.mark.parametrize("waits, moved, operation", [
        (0, [], lambda x: x.masked_fill(x > 2, 0.0).masked_scatter(x > 2, x).sort().values),
        (1, [], lambda x: float(x[0, 0])),
        (1, [("copy to host", 3)], lambda x: x[0].tolist()),
        (0, [("copy to device", 4)], lambda x: torch.zeros(4).to("pretend:0", non_blocking=True)),
        (1, [("copy to device", 3)], lambda x: x[0].copy_(torch.zeros(3))),
        (1, [("copy to device", 2)], lambda x: x[[1, 0]]), (1, [], lambda x: x[x > 2])])
    @pytest.mark.parametrize("inference", [False, True])
    def test_waits_and_copies_are_counted(self, waits, moved, operation, inference):
        with pretend_device() as device, torch.inference_mode(inference):
            x = torch.arange(6.0, device="pretend:0").view(2, 3)
            operation(x)
        assert device.waits.total() == waits
        assert [(what, elements) for _, what, elements in device.moved] == moved


@pytest.mark.parametrize("device", DEVICES)
class TestNumbers:
    """One training step on both devices: tokens, metrics, weights."""

    def compare(self, device, options, tolerance, weight_tolerance):
        """weight_tolerance: root mean square of the differences, in learning rates"""
        (cpu, expected, theirs, _), (ours, metrics, played, _) = (
            step(where, **options) for where in ("cpu", device))
        assert ours.policy.device.type == device.partition(":")[0]
        assert "gradient/all/task" in metrics
        assert ("first_turn/mi" in metrics) == (options.get("env") == "frozenlake")
        assert [[s.tokens for s in t.sequences] for t in played] == [
            [s.tokens for s in t.sequences] for t in theirs]
        assert_close(metrics, expected, tolerance)
        gap = torch.cat([(b.detach().cpu() - a.detach()).flatten() for a, b in zip(
            cpu.optimizer.masters, ours.optimizer.masters, strict=True)])  # as many: still tied
        assert gap.square().mean().sqrt() < weight_tolerance * LOTTERY["lr"]
        return ours

    @pytest.mark.parametrize("options", [
        LAKE, LOTTERY | dict(algo="ppo", activation_checkpointing=True),
        LOTTERY | KL | dict(algo="bi-level"),
        LOTTERY | dict(context="limited", window=2, top_k=9, top_p=0.9)])
    def test_a_step_gives_the_cpus_tokens_metrics_and_weights(self, device, options):
        self.compare(device, options, 1e-3, 1e-2)

    @pytest.mark.parametrize("rank", LORA)
    def test_bfloat16_weights_with_float32_masters_give_the_cpus(self, monkeypatch, device, rank):
        """Attention rounds differently, so that both devices play but learn from equal episodes."""
        episodes = []

        def once(*arguments):
            episodes.append(collect(*arguments))
            return copy.deepcopy(episodes[0])

        monkeypatch.setattr(start, "load_policy", halved)
        monkeypatch.setattr(start, "collect", once)
        learner = self.compare(device, LOTTERY | dict(algo="ppo", kl_coef=0.1, lora_rank=rank),
                               0.03, 0.2)
        assert learner.policy.model.dtype == torch.bfloat16
        assert all(m.dtype == torch.float32 for m in learner.optimizer.masters)

    @pytest.mark.parametrize("rank", LORA)
    def test_a_resumed_run_equals_an_uninterrupted_one_and_that_of_the_cpu(self, device, rank):
        options = LOTTERY | dict(algo="ppo", kl_coef=0.1, lora_rank=rank)
        whole, lines = run(configured(device, run="whole", **options))
        cut = configured(device, run="cut", **options | dict(steps=1))
        run(cut)
        resumed, _ = run(dataclasses.replace(cut, steps=2), resume=True)
        # A GPU adds in any order, so there rounding differs.
        torch.testing.assert_close(resumed, whole, rtol=0, atol=1e-6 * (device == "cuda"))
        cpu, expected = run(configured("cpu", run="cpu", **options))
        torch.testing.assert_close(whole, cpu, rtol=0, atol=options["lr"] / 20)
        assert_close(lines[-1], expected[-1], 1e-3)


class TestWaits:
    @staticmethod
    def steps_of(played, ahead=1):
        """Decode steps in which each turn's longest reply is sampled, so many at a time."""
        replies = [[sum(s.turn_ids.count(turn) for s in t.sequences)
                    for turn in range(len(t.turns))] for t in played]
        longest = [max(n) for n in itertools.zip_longest(*replies, fillvalue=0)]
        assert sum(longest) > 60, "most replies are cut off"
        return sum(-(-n // ahead) for n in longest)

    @pytest.mark.parametrize("context", ["full", "limited"])
    @pytest.mark.parametrize("ahead", [1, sampling.AHEAD])
    def test_a_rollout_waits_once_for_a_token_of_all_rows_or_for_eight(self, ahead, context):
        policy, frame = small()
        if ahead > 1:
            policy = dataclasses.replace(policy, sample_replies=sampling.sample_replies,
                                         regather=functools.partial(sampling.regather, 648, []))
        if context == "limited":
            frame = WindowedFrame(policy.tokenizer, context=context, window=1)
        groups = EnvGroups("toys:Lottery", 2, 2, budgets=dict(max_turns=3))
        rules = Rules(max_new_tokens=48, max_context=600)
        with pretend_device() as device:
            policy = dataclasses.replace(policy, model=copy.deepcopy(policy.model).to("pretend:0"))
            device.waits.clear()
            played = collect(policy, frame, groups, 0, rules)
        assert device.waits.total() <= self.steps_of(played, ahead)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_on_a_gpu_too_and_it_replays_graphs(self, monkeypatch):
        policy, frame = small()
        model = copy.deepcopy(policy.model).to("cuda", torch.bfloat16)
        policy = faster(dataclasses.replace(policy, model=model), room=648)
        groups = EnvGroups("toys:Lottery", 2, 2, budgets=dict(max_turns=3))
        rules = Rules(max_new_tokens=48, max_context=600)
        replays = []
        monkeypatch.setattr(graphs.Graph, "__call__", lambda graph: (
            replays.append(graph), graph.graph.replay(), graph.result)[-1])
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as waits:
                warnings.simplefilter("always")
                played = collect(policy, frame, groups, 0, rules)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waited = [w for w in waits if "synchronizing" in str(w.message)]
        assert 0 < len(waited) <= self.steps_of(played, sampling.AHEAD) and replays
        batch = make_batch(played).to("cuda")
        ours, _ = policy.logprobs(batch.tokens, batch.response_mask)
        assert (ours - batch.sample_logprobs)[batch.response_mask].abs().mean() < 0.05

    def test_no_copy_grows_with_the_vocabulary(self, monkeypatch):
        """The larger vocabulary has ids that are never sampled, so the episodes are the same."""
        def widened(extra, *arguments, **options):
            policy = load_policy(arguments[0], **options)
            used = len(policy.tokenizer)
            policy.model.resize_token_embeddings(used + extra, mean_resizing=False)
            bias = torch.cat([torch.zeros(used), torch.full((extra,), -1e4)])
            policy.model.lm_head.bias = torch.nn.Parameter(bias)
            policy.model.to("pretend:0")
            return policy

        moved = []
        for extra in (8, 1000):
            monkeypatch.setattr(start, "load_policy", functools.partial(widened, extra))
            learner, metrics, _, device = step("pretend:0", **LOTTERY | KL | dict(algo="ppo"))
            assert {"gradient/all/task", "kl_ref", "value_loss"} <= metrics.keys()
            with device:
                diagnostics.score_matrix(learner.policy, [[3, 4], [5]], [[6, 7], [8]])
            moved.append(device.moved)
        assert moved[0] == moved[1]


def test_the_benchmark_for_gpus_runs_on_a_cpu(monkeypatch, capsys):
    monkeypatch.setattr(start, "load_policy", halved)
    results = gpu.main([f"--{name.replace('_', '-')}={value}" for name, value in {
        **LOTTERY, "env": "toys:Lottery", "device": "cpu"}.items()])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]).keys() >= results.keys()
    (results,) = results.values()
    assert all(number > 0 for number in results.pop("decode steps").values())
    for numbers in results.values():
        assert 0.99 < numbers["gradient, cosine with float32"] < 1
        assert 0 < numbers["gradient, relative error"] < 0.15
        assert 0 < numbers["sampler and float32 differ by, nats"] < 0.05
        assert all(number > 0 for number in numbers.values() if not math.isnan(number))
