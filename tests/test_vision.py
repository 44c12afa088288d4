"""Policies that see: families of towers.py, images as ids beyond the vocabulary."""

import copy
import functools
import itertools
import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import towers
import transformers
from conftest import message
from several import several
from test_train import build, played, updated
from towers import TORCHVISION, folder_of, gemma3, gemma4, idefics3, llava, mistral3
from toys import Painted, tiny
from training import assert_resumed_alike, changed, read_lines, run

from minragen import eval as evaluation
from minragen import train as trainer
from minragen.cache import KVSlots, regather
from minragen.chat import ChatFrame
from minragen.envs import IMAGE, EnvGroups, Observation
from minragen.models import Critic, token_logprobs
from minragen.more import vision
from minragen.more.vision import ImageStore
from minragen.rollout import Rules, collect
from minragen.run.groups import PatientGroups
from minragen.run.load import PROCESSOR_FILES, load_policy, processor_of
from minragen.run.proof import prove
from minragen.trajectory import make_batch

PAINTED = shlex.split(
    "--env toys:Painted --model tiny-vlm --warmup-steps 0 --num-groups 4 --group-size 4 --val-size "
    "3 --max-new-tokens 8 --mini-batch 8 --lr 1e-3 --diagnose-every 0")


@pytest.fixture(scope="module")
def tmp(tmp_path_factory):
    return tmp_path_factory.mktemp("vision")


@functools.cache
def loaded(family, tmp):
    return load_policy(folder_of(family, tmp))


@functools.cache
def played_by(family, tmp):
    return play(loaded(family, tmp), members=2, cap=12)


def play(policy, members, cap):
    """Trajectories of two groups of FrozenLake as images."""
    groups = EnvGroups("frozenlake", 2, members, options={"view": "image"})
    frame = ChatFrame(policy.tokenizer, image_store=policy.image_store)
    return collect(policy, frame, groups, 0, Rules(max_new_tokens=cap, max_context=1000))


QWEN = [towers.qwen2_5_vl, towers.qwen3_vl, towers.qwen3_5]
SEEING = [llava, idefics3, gemma3, *QWEN, *(
    pytest.param(family, marks=pytest.mark.skipif(
        not TORCHVISION, reason=f"{family.__name__}'s processor needs torchvision"))
    for family in (gemma4, mistral3))]


@pytest.fixture(params=SEEING)
def policy(request, tmp):
    policy = loaded(request.param, tmp)
    policy.image_store.forget()
    policy.image_store.shape = 32, 32, 3
    return replace(policy, model=copy.deepcopy(policy.model))  # with the same image_store


@pytest.fixture
def conversations(request, policy, tmp):
    """Trajectories of two groups of two."""
    trajectories = played_by(request.node.callspec.params["policy"], tmp)
    policy.end_rollout(trajectories)
    return trajectories


def image(seed, side=32):
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)


class TestImageStore:
    def test_equal_images_have_equal_ids_and_others_only_the_processors_marks(self, policy):
        image_store = policy.image_store
        one, again, other = (image_store.ids_of(image(seed)) for seed in (0, 0, 1))
        assert one == again and sum(i >= image_store.first for i in one) == image_store.size
        around = [i for i in one if i < image_store.first]
        assert {*one} & {*other} == {*around}
        marks = {"llava": 0, "idefics3": 3}.get(Path(policy.name).name, 2)
        special = {*policy.tokenizer.all_special_ids,
                   *policy.tokenizer.convert_tokens_to_ids(towers.MARKS)}
        assert sum(i in special for i in around) == marks

    def test_text_beside_an_image_ends_no_turn_and_is_no_image(self, policy):
        frame = ChatFrame(policy.tokenizer, image_store=policy.image_store)
        mark, store = policy.tokenizer.decode([frame.end_of_turn]), policy.image_store
        system = frame.system_message(SimpleNamespace(system_prompt="rules <image>"))
        first, marked = (frame.first_prompt_ids(system, Observation(f"{x} {IMAGE} {x}", image(0)))
                         for x in ("x", mark))
        assert first.count(frame.end_of_turn) == marked.count(frame.end_of_turn) > 0
        assert sum(i >= store.first for i in first) == store.size and store.image_id not in first

    def test_an_images_number_is_48_bits_that_its_pixels_and_its_shape_decide(self, monkeypatch):
        """With 16 bits two of a step's images would soon be one."""
        processor = SimpleNamespace(image_token=IMAGE)
        image_store = ImageStore(processor, SimpleNamespace(
            image_token_id=0, get_text_config=lambda: SimpleNamespace(vocab_size=9)))
        monkeypatch.setattr(image_store, "_read", lambda image, number: number)
        numbers = {image_store.ids_of(np.frombuffer(k.to_bytes(12), np.uint8).reshape(shape))
                   for k in range(1000) for shape in ((1, 4, 3), (2, 2, 3), (4, 1, 3))}
        assert len(numbers) == 3000 and 2**47 < max(numbers) < 2**48

    def test_a_forgotten_image_or_one_seen_elsewhere_is_an_error_until_it_is_given(self, policy):
        mine, embed = policy.image_store, policy.model.base_model.get_input_embeddings()
        before = mine.ids_of(image(0))
        mine.forget()
        mine.ids_of(image(1))
        theirs = ImageStore(mine.processor, policy.model.config)
        assert theirs.ids_of(image(0)) == before
        for ids in (before, theirs.ids_of(image(2))):
            with pytest.raises(KeyError):
                embed(torch.tensor([ids]))
        assert mine.ids_of(image(0)) == before
        policy.end_rollout([SimpleNamespace(turns=[SimpleNamespace(
            observation=Observation(IMAGE, image(2)))])])
        embed(torch.tensor([before, theirs.ids_of(image(2))]))

    def test_embeddings_by_layer_see_no_image(self):
        seen = vision._hide_images(torch.clone, SimpleNamespace(first=7), 3, torch.arange(5, 9))
        assert seen.tolist() == [5, 6, 3, 3]

    def test_images_of_another_size_are_refused(self, tmp):
        image_store = load_policy(folder_of(llava, tmp)).image_store
        image_store.ids_of(image(0))
        with pytest.raises(ValueError, match="an image has 4 tokens and an earlier one has 16"):
            image_store.ids_of(image(0, side=16))
        image_store.forget()
        assert len(image_store.ids_of(image(0, side=16))) == 4


class TestRollout:
    def test_cached_turns_with_images_equal_a_full_pass(self, policy, conversations):
        """The full pass is the model's own, on pixels and `<image>` tokens."""
        # One that sampled `<image>` itself, an ordinary id here, cannot be told to transformers.
        marks = {getattr(policy.model.config, f"{mark}_token_id", None)
                 for mark in ("image", "video", "audio")}
        told = [t for t in conversations if not marks & {*t.tokens}]
        assert max(len(t.turns) for t in told) > 1
        for t in told:
            tokens = torch.tensor([t.tokens])
            log_p = policy.model(tokens, use_cache=False).logits.float().log_softmax(dim=-1)
            mask = torch.tensor(t.sequences[0].response_mask)[1:]
            theirs = log_p[0, :-1][mask].gather(-1, tokens[0, 1:][mask][:, None])[:, 0]
            ours = torch.tensor(t.sequences[0].sample_logprobs)[1:][mask]
            assert (ours - theirs).abs().max().item() < 1e-4


@pytest.mark.parametrize("policy", QWEN, indirect=True)
class TestGrids:
    """M-RoPE: Qwen's positions are three numbers. These images of 12 tokens have three grids."""

    SIDES = (32, 96), (48, 64), (96, 32)

    @pytest.fixture
    def rows(self, policy):
        """Ids of three conversations, of one to three images."""
        def ids_of(i, part):  # of a text's length, or of the sides of an image
            if i % 2 == 0:
                return rng.integers(300, size=part).tolist()
            shape = *self.SIDES[part], 3
            return policy.image_store.ids_of(rng.integers(256, size=shape, dtype=np.uint8))

        rng = np.random.default_rng(0)
        return [torch.tensor([x for i, part in enumerate(parts) for x in ids_of(i, part)])
                for parts in ((7, 0, 5, 1, 3), (2, 2, 1, 0, 4, 1, 9), (20, 1, 2))]

    @pytest.mark.parametrize("seed", range(3))
    @torch.no_grad()
    def test_rows_in_pieces_that_swap_and_split_equal_full_passes(self, policy, rows, seed):
        """Pieces may end within an image. After each one the slots are put into another order, and
        at first a row is copied. Last the proof, of the learner too."""
        full = [policy.model(ids[None]).logits[0].log_softmax(dim=-1) for ids in rows]
        rng, order, slots = np.random.default_rng(seed), [0, 1, 2], KVSlots(policy.model, 3, 100)
        while lasting := [i for i, row in enumerate(order) if slots.lengths[i] < len(rows[row])]:
            fresh = [rows[row][n:n + rng.integers(i in lasting, 12)]
                     for i, (row, n) in enumerate(zip(order, slots.lengths.tolist()))]
            counts = torch.tensor([*map(len, fresh)])
            logits = policy.extend(slots, torch.nn.utils.rnn.pad_sequence(fresh, True), counts)
            slots.bounds = slots.lengths.clone()
            for i in counts.nonzero()[:, 0]:
                gap = logits[i].log_softmax(dim=-1) - full[order[i]][slots.lengths[i] - 1]
                assert gap.abs().mean() < 1e-4
            if len(order) == 3:
                slots, order = regather([(slots, [2, 0]), (slots, [1, 0])], 100), [
                    order[i] for i in (2, 0, 1, 0)]
            swapped = slots.move_to_front(sorted(rng.permutation(4)[:2].tolist()))
            order = [order[i] for i in swapped]
        policy.image_store.shape = 48, 64, 3
        assert "gap" in prove(policy, 320)


class TestLearning:
    def test_it_computes_images_again_with_gradients_up_to_the_tower(self, policy, conversations):
        batch = make_batch(conversations)
        logprobs, _ = token_logprobs(policy.model, batch.tokens, batch.response_mask)
        assert (logprobs - batch.sample_logprobs).abs().max().item() < 1e-4
        logprobs.sum().backward()
        # What the pooling head of SigLIP computes is not used, nor a layer after the last feature.
        idle = [name for name, p in policy.model.named_parameters()
                if p.grad is None or not p.grad.any()]
        assert not [name for name in idle if ".head." not in name and "post_layernorm" not in name]

    def test_the_critic_sees_through_a_tower_of_its_own(self, policy, conversations):
        batch = make_batch(conversations)
        critic = Critic(policy)
        critic.head.weight.data.fill_(0.1)
        before = critic(batch.tokens, batch.response_mask)
        for p in policy.model.parameters():
            p.data.zero_()
        assert torch.equal(critic(batch.tokens, batch.response_mask), before)

    def test_a_saved_policy_computes_what_transformers_does_of_the_pixels(self, policy, tmp_path):
        """In Gemma 3 the tokens of an image see each other, which its processor asks for."""
        policy.save(tmp_path)
        model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path)
        processor, store = processor_of(model.config, tmp_path), policy.image_store
        mark = (policy.tokenizer.decode(store.start) + processor.image_token +
                policy.tokenizer.decode(store.end))
        seen = processor(text=f"{mark} goal{mark}", images=[[image(0), image(1)]],
                         add_special_tokens=False, return_tensors="pt")
        for ours in (policy, load_policy(tmp_path)):
            (one, other), store = map(ours.image_store.ids_of, map(image, (0, 1))), ours.image_store
            ids = torch.tensor([[*one, *ours.tokenizer.encode(" goal"), *other]])
            assert torch.equal(ids.masked_fill(ids >= store.first, store.image_id),
                               seen["input_ids"])
            assert (ours.model(ids).logits - model(**seen).logits).abs().max() < 1e-4


VISUAL_LAKE = shlex.split(
    "--env frozenlake --env-arg view=image --layer random_reward --warmup-steps 0 --num-groups 2 "
    "--group-size 4 --val-size 2 --mini-batch 8 --max-new-tokens 8 --max-context 1600 "
    "--max-turns 3 --filter none")


@pytest.mark.usefixtures("runs")
class TestRuns:
    @pytest.mark.parametrize("options", [
        "--algo ppo", "--algo ppo --lora-rank 4", "--activation-checkpointing true", "--plain true",
        "--context limited --window 2"])
    def test_a_qwen_learns_from_what_was_sampled_in_all_weights_or_in_adapters(self, options, tmp):
        """The first layers of Qwen3-VL take features of images from the tower."""
        if "lora" in options:
            pytest.importorskip("peft")
        config, learner, batch = played(
            *VISUAL_LAKE, "--model", str(folder_of(towers.qwen3_vl, tmp)), *options.split())
        models = filter(None, (learner.policy.model, learner.critic))
        metrics, moved = updated(config, learner, batch, *models)
        assert metrics["logprob_gap"] < 1e-5
        for names, part in itertools.product(moved, ("deepstack_merger_list", "patch_embed")):
            assert any(part in name for name in names) == ("lora" not in options), part
        assert all("layers" in " ".join(names) for names in moved)

    def test_a_killed_run_goes_on_bit_for_bit(self, runs, monkeypatch):
        assert_resumed_alike(runs, monkeypatch, [*PAINTED, *shlex.split(
            "--algo ppo --kl-coef 0.1 --steps 2 --save-every 1 --num-groups 2")])

    def test_a_step_keeps_its_own_images_only(self):
        config, learner, groups = build(*PAINTED)
        for step in range(2):
            played = trainer.roll_out(learner, groups, config)
            learner.step += 1
            store = learner.policy.image_store
            seen = {i for t in played for i in t.tokens if i >= store.first}
            assert len(store.pixels) * store.size == len(seen) > store.size * step

    @pytest.mark.parametrize("env", ["toys:Painted", "toys:Painted,toys:Lottery"])
    def test_two_processes_are_one(self, env, monkeypatch):
        """Each sees images of its own groups, perhaps none, and trains on those of all."""
        gradients = []

        def keep(optimizer, max_grad_norm):  # no step: Adam would magnify what is rounding
            gradients.append(torch.cat([m.grad.flatten() for m in optimizer.masters
                                        if m.grad is not None]))
            optimizer.clear()
            return gradients[-1].norm()

        def updated():
            config, learner, groups = build(*PAINTED, "--env", env, "--filter", "none")
            batch = make_batch(trainer.roll_out(learner, groups, config))
            batch, _ = trainer.compute_targets(learner, batch, config)
            trainer.update(learner, batch, config, 1)
            return batch.tokens.tolist(), gradients

        monkeypatch.setattr(trainer.AdamW, "step", keep)
        together = several(2, updated)
        tokens, expected = updated()
        for theirs, found in together:
            assert theirs == tokens
            for one, other in zip(expected, found, strict=True):
                assert one.norm() > 0 and (one - other).norm() < 1e-5 * one.norm()

    def test_a_run_stores_its_images_and_a_plain_folder(self, drawn, runs):
        run("--run a --steps 1", *PAINTED)
        for episode in (episodes := read_lines(runs / "a/trajectories.jsonl")):
            world = Painted(episode["split"])
            world.reset(seed=episode["seed"])
            for world._turns, uri in enumerate(episode["images"]):
                assert uri == vision.data_uri(world.image())
                assert uri in (runs / "a/report.html").read_text()
            assert world._turns + 1 == sum(  # a reply may hold the word, too
                m["content"].count(IMAGE) for m in episode["messages"] if m["role"] == "user")
        assert max(len(episode["images"]) for episode in episodes) > 1
        assert transformers.AutoModelForImageTextToText.from_pretrained(runs / "a/checkpoint")
        evaluation.main(["--run", "a", "--size", "4"])

    def test_a_window_shows_its_images(self):
        _, learner, batch = played(*PAINTED, "--context", "limited", "--window", "2")
        images = (batch.tokens >= learner.policy.image_store.first).sum(dim=1)
        assert {*(images // learner.policy.image_store.size).tolist()} == {1, 2}

    @pytest.mark.parametrize("options, said", [
        ("--context single_turn --window 2", "use --context full or limited"),
        ("--model tiny --env frozenlake --env-arg view=image", "this model reads only text"),
        ("--env frozenlake --env-arg view=grid", "tiny-vlm needs square images"),
        ("--env frozenlake,sokoban --env-arg frozenlake.view=image --env-arg sokoban.view=image",
         "tiny-vlm needs square images of one size")])
    def test_what_does_not_fit_is_refused_with_a_sentence(self, options, said):
        assert said in message(*PAINTED, *options.split())


@pytest.fixture
def package(request, tmp):
    """A folder with a vision tower, whose processor need not be there."""
    return folder_of(request.param, tmp)


@pytest.mark.usefixtures("runs")
class TestTextOnly:
    """Where no environment shows images a vision-language model is its decoder."""

    @pytest.mark.parametrize("package", [gemma4, mistral3, gemma3, *QWEN], indirect=True)
    def test_it_is_proved_saved_as_loaded_and_trained_in_its_decoder_alone(self, package, tmp_path):
        policy = load_policy(package, sees=lambda: False)
        policy.save(tmp_path)
        assert "gap" in prove(policy, 320) and policy.image_store is None
        tokens = torch.randint(len(policy.tokenizer), (2, 30))
        policy.logprobs(tokens, torch.arange(30).expand(2, 30) > 9)[0].sum().backward()
        decoder, head = policy.model.base_model, policy.model.get_output_embeddings()
        trained = {*decoder.parameters(), *head.parameters()}
        for name, p in policy.model.named_parameters():
            assert p.requires_grad == (p in trained), name
            assert (p.grad is not None) == (p in trained), name
        before, after = (transformers.AutoModelForImageTextToText.from_pretrained(
            folder).state_dict() for folder in (package, tmp_path))
        assert before.keys() == after.keys()
        assert all(torch.equal(x, after[name]) for name, x in before.items())
        for name in PROCESSOR_FILES:
            assert (package / name).exists() == (tmp_path / name).exists()
            if (package / name).exists():
                assert (package / name).read_bytes() == (tmp_path / name).read_bytes()

    @pytest.mark.parametrize("package", [gemma4, towers.qwen3_5], indirect=True)
    def test_runs_say_so_resume_exactly_and_are_measured(self, package, runs, monkeypatch, capsys):
        options = shlex.split(f"--env frozenlake --model {package} --warmup-steps 0 --num-groups 2 "
                              f"--group-size 2 --val-size 2 --mini-batch 4 --max-new-tokens 8 "
                              f"--max-turns 2 --kl-coef 0.1 --steps 2 --save-every 1")
        assert_resumed_alike(runs, monkeypatch, options)
        assert "reads text only: its vision tower is frozen" in capsys.readouterr().out
        evaluation.main(["--run", "straight", "--size", "2"])
        assert "reads text only" in capsys.readouterr().out

    @pytest.mark.skipif(TORCHVISION, reason="torchvision is installed")
    @pytest.mark.parametrize("package", [gemma4, mistral3], indirect=True)
    def test_images_for_processors_that_need_torchvision_are_refused_with_a_command(self, package):
        assert ("to see images it needs torchvision. Install the one for your PyTorch (pip install "
                "torchvision) or choose a view without images.") in message(
                    *VISUAL_LAKE, "--model", str(package))


@pytest.fixture
def other(tmp, tmp_path):
    """A copy of llava's folder."""
    return Path(shutil.copytree(folder_of(llava, tmp), tmp_path / "other"))


class TestBadInput:
    @pytest.mark.parametrize("text, image, said", [
        (IMAGE, np.zeros((8, 8, 3)), "an image is float64 of shape (8, 8, 3)"),
        (IMAGE, np.zeros((8, 8), np.uint8), "uint8 of shape (8, 8), and"),
        (IMAGE, np.zeros((0, 8, 3), np.uint8), "shape (0, 8, 3)"),
        (IMAGE, [[1]], "int64 of shape (1, 1)"), ("", image(0), f"has 0 times {IMAGE}: "),
        (f"{IMAGE} {IMAGE}", image(0), f"has 2 times {IMAGE}: ")])
    def test_no_image_or_not_one_placeholder_is_the_environments_error(self, text, image, said):
        observation = Observation(text, image)
        with pytest.raises(ValueError, match=re.escape(said)):
            PatientGroups.observed(SimpleNamespace(state=""), observation)

    def test_a_config_with_another_image_token_is_refused(self, other):
        changed(other / "config.json", image_token_id=5)
        with pytest.raises(RuntimeError, match="the processor writes none of the model's image to"):
            prove(load_policy(other), 320)

    def test_python_that_a_processors_file_names_is_never_run(self, other, monkeypatch):
        monkeypatch.setattr(transformers.LlavaProcessor, "_auto_class", None)  # which loading sets
        changed(other / "processor_config.json", auto_map={"AutoProcessor": "evil.Evil"})
        (other / "evil.py").write_text("from transformers import LlavaProcessor as Evil\n"
                                       f"open({str(other / 'it ran')!r}, 'w')\n")
        assert load_policy(other).image_store and not (other / "it ran").exists()
        transformers.AutoProcessor.from_pretrained(other, trust_remote_code=True)
        assert (other / "it ran").exists()

    def test_templates_that_read_lists_of_parts_alone_are_derived(self):
        from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

        tokenizer = copy.deepcopy(tiny()[0].tokenizer)
        tokenizer.add_special_tokens({"additional_special_tokens": [
            "<|im_start|>", "<end_of_utterance>"]})
        tokenizer.chat_template = DEFAULT_CHAT_TEMPLATE
        frame, said = ChatFrame(tokenizer), ("rules", "Go.")
        rendered = tokenizer.apply_chat_template([
            dict(role=role, content=[dict(type="text", text=text)])
            for role, text in zip(("system", "user"), said)], tokenize=False,
            add_generation_prompt=True)
        assert tokenizer.decode(frame.first_prompt_ids(*said)) == tokenizer.decode(
            tokenizer(f"{rendered} {frame.prefix}", add_special_tokens=False)["input_ids"])


class TestProof:
    @pytest.mark.skipif(not TORCHVISION, reason="gemma4's processor needs torchvision")
    def test_a_gemma_4_that_reads_images_in_both_directions_is_refused(self, tmp, tmp_path):
        folder = Path(shutil.copytree(folder_of(gemma4, tmp), tmp_path / "larger"))
        text = json.loads((folder / "config.json").read_text())["text_config"]
        changed(folder / "config.json", text_config=text | dict(
            use_bidirectional_attention="vision"))
        with pytest.raises(RuntimeError, match="differs between cached turns and a full pass"):
            prove(load_policy(folder), 320)
        assert "gap" in prove(load_policy(folder, sees=lambda: False), 320)

    def test_a_model_whose_rows_see_other_images_is_refused(self, policy, monkeypatch):
        assert "gap" in prove(policy, 320)
        real = vision.ImageStore.arguments
        monkeypatch.setattr(vision.ImageStore, "arguments", lambda store, whole, numbers: real(
            store, whole, numbers.flip(0) if whole is policy.model.whole.base_model else numbers))
        with pytest.raises(RuntimeError, match="differs between cached turns and a full pass"):
            prove(policy, 320)
