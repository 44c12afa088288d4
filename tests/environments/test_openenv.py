"""OpenEnv both ways: our environments behind our server, other people's servers, TRL's trainer."""

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path

import pytest
from conftest import message, parsed
from test_envs import refusal
from toys import replies, web_server
from training import metrics, read_lines

from minragen import envs
from minragen import train as trainer
from minragen.__main__ import main as command
from minragen.config import BUDGETS
from minragen.environments import limits
from minragen.environments.limits import ServerGone
from minragen.envs import FORMAT_PENALTY, make
from minragen.look.players import scripted
from minragen.run import groups as run_groups
from minragen.run import start
from minragen.run.groups import PatientGroups

openenv = pytest.importorskip("openenv.core", reason="pip install openenv")
ROOT = Path(__file__).parents[2]
BRIEF = shlex.split("--num-groups 3 --group-size 4 --val-size 2 --val-every 9 --save-every 9 "
                    "--diagnose-every 0")


@contextlib.contextmanager
def running(*words):
    """(a process that serves, its address); in the end it is killed."""
    with subprocess.Popen([sys.executable, *words], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                          env=os.environ | {"PYTHONPATH": "tests"}) as process:
        try:
            yield process, process.stdout.readline().split()[-1]
        finally:
            process.kill()


def ours(env, *words):
    return running("-m", "minragen", "serve", "--port", "0", "--env", env, *words)


@pytest.fixture(scope="module")
def others():
    with running("tests/openenv_servers.py", "0") as (_, url):
        yield f"openenv:{url}"


def words_of(config):
    """The words for our server that say the environment's options and budget of a Config."""
    words = [word for text in config.env_arg for word in ("--env-arg", text)]
    return words + [f"--{name.replace('_', '-')}={value}" for name in BUDGETS
                    if (value := getattr(config, name))]


def status_of(url, **headers):
    """The status with which our server answers a request with these headers."""
    request = urllib.request.Request(f"{url}/health", headers=headers)
    try:
        return urllib.request.urlopen(request).status
    except urllib.error.HTTPError as refused:
        return refused.code


class TestOurs:
    @pytest.mark.parametrize("env", ["frozenlake", "bandit"])
    def test_a_run_over_the_network_is_the_local_run(self, runs, monkeypatch, env):
        begun = parsed("--env", env, "--run", "begun", "--steps", "1", *BRIEF)
        start.run(begun, say=lambda _: None)
        episodes, roll_out = [], trainer.roll_out
        monkeypatch.setattr(trainer, "roll_out", lambda *given: (
            episodes.append(roll_out(*given)) or episodes[-1]))
        here = dataclasses.replace(begun, run="here", steps=2, init_from="begun")
        with ours(env, *words_of(begun)) as (_, url):
            there = dataclasses.replace(here, run="there", env=f"openenv:{url}", env_arg=())
            for config in (here, there):
                start.run(config, say=lambda _: None)
        assert metrics(runs / "there") == metrics(runs / "here")
        for turn in (turn for played in episodes for t in played for turn in t.turns):
            turn.times = ()
        local, remote = episodes[:2], episodes[2:]
        assert len({t.episode_return for played in local for t in played}) > 1
        assert remote == local  # tokens, logprobs, masks, rewards, ends, texts
        assert [len(played) for played in local] == [12, 12]

    def test_every_split_and_member_with_its_options_and_budget_is_the_local_one(self):
        with ours("frozenlake", "--env-arg", "slip=0.4", "--max-turns", "4") as (_, url):
            for split in envs.SPLITS:
                here = PatientGroups("frozenlake", 3, 4, split, {"slip": 0.4}, {"max_turns": 4})
                there = PatientGroups(f"openenv:{url}", 3, 4, split)
                local, remote = (scripted(groups, lambda env, texts, rng: (
                    "Left || Down", "Right", "fly", "")[len(texts) // 2 - 1])
                    for groups in (here, there))
                assert local == remote
                assert len({str(t.messages()) for t in local}) > 3  # members slip by themselves

    def test_openenvs_client_needs_nothing_of_ours(self):
        with (ours("walks:Walk") as (_, url),
              openenv.GenericEnvClient(base_url=url).sync() as client):
            assert client.reset(seed=3).observation["text"].startswith("Day ")
            result = client.step({"message": "Right || Right"})
            assert "at 2" in result.observation["text"]
            assert (result.reward, result.done) == (-0.25, False)
            assert client.state()["step_count"] == 1
            result = client.step({"message": "right"})
            assert (result.reward, result.done) == (0.875, True)
            with pytest.raises(RuntimeError, match="without a live episode"):
                client.step({"message": "Right"})

    def test_it_listens_to_programs_of_this_machine_alone_and_stops_at_ctrl_c(self):
        from websockets.exceptions import InvalidStatus
        from websockets.sync.client import connect

        with ours("bandit") as (process, url):
            assert url.startswith("http://127.0.0.1:")
            assert [status_of(url, **headers) for headers in (
                {}, {"Host": "127.0.0.1"}, {"Host": "rebound.example"},
                {"Origin": "https://page.example"})] == [200, 200, 403, 403]
            for origin in ("https://page.example", None):
                refused = pytest.raises(InvalidStatus, match="403")
                with (refused if origin else contextlib.nullcontext(),
                      connect(f"ws{url[4:]}/ws", origin=origin) as socket):
                    socket.send('{"type": "reset"}')
                    assert json.loads(socket.recv())["type"] == "observation"
            process.send_signal(signal.SIGINT)
            assert (process.wait(20), process.stdout.read()) == (0, "stopped\n")

    @pytest.mark.parametrize("words, said", [
        ("bandot", "unknown env 'bandot': did you mean 'bandit'?"),
        ("bandit --host nobody.invalid", "error: cannot listen on http://nobody.invalid:8000: ")])
    def test_what_cannot_be_served_is_refused(self, words, said):
        with pytest.raises(SystemExit, match=re.escape(said)):
            command(["serve", "--env", *words.split()])

    def test_it_answers_websockets_and_short_requests_only(self):
        with ours("bandit") as (_, url):
            request = urllib.request.Request(f"{url}/step", data=b"x" * 2**24)
            with pytest.raises((urllib.error.HTTPError, ConnectionError, urllib.error.URLError)):
                urllib.request.urlopen(request)
        with ours("bandit", "--host", "::1") as (_, url):
            assert url.startswith("http://[::1]:")
            assert (status_of(url), status_of(url, Host="rebound.example:80")) == (200, 403)


class TestOthers:
    def test_a_game_is_played_by_its_own_observations_rewards_and_ends(self, others):
        groups = PatientGroups(f"{others}/guess", 8, 2)
        for answer in map(str, range(10)):
            assert {*groups.reset(5)} == {"Which number?[2J"}  # no terminal escape
            won = [turn == ("yes", 1.0, True, False, {"success": 1.0, "valid": 1.0})
                   for turn in groups.step(range(16), replies([answer] * 16))]
            assert won[::2] == won[1::2]  # members play the same number
            groups.numbers_won = getattr(groups, "numbers_won", 0) + sum(won)
        assert groups.numbers_won == 16  # and the same seed draws it again
        assert groups.envs[0].system_prompt == "Game environment"

    @pytest.mark.parametrize("game, answer, shown", [
        ("guess", "x" * 99, "Which number?[2J"), ("guess", "", "Which number?[2J"),
        ("echo", " ", "ready")])
    def test_a_reply_without_an_answer_or_one_that_the_schema_refuses_is_the_replys_fault(
            self, others, game, answer, shown):
        groups = PatientGroups(f"{others}/{game}", 1, 1, budgets={"max_turns": 2})
        groups.reset(0)
        for last in (False, True):
            assert groups.step([0], replies([answer])) == [(
                f"No valid action was given.\n{shown}", FORMAT_PENALTY, False, last,
                {"success": 0.0, "valid": 0.0})]

    @pytest.mark.parametrize("least, success", [(1.0, 0.0), (0.1, 1.0)])
    def test_an_end_with_less_than_the_asked_reward_is_no_success(self, others, least, success):
        env = make(f"{others}/echo", success=least)
        env.reset()
        assert env.step("end")[1:] == (0.1, True, False, {"success": success, "valid": 1.0})

    def test_its_metadata_are_no_metrics_and_its_name_is_no_split(self, others):
        env = make(f"{others}/echo")
        env.reset()
        assert env.step("boast")[4] == {"success": 0.0, "valid": 1.0}
        assert env.alias == "openenv:Echo"

    def test_splits_of_one_seed_are_asked_for_with_different_seeds(self, others):
        asked = []
        for split in envs.SPLITS:
            for seed in (0, 2**41, 2**41 + 1):
                env = make(f"{others}/guess", split)
                env._ask = partial(lambda env, call, **named: asked.append(named) or type(env)._ask(
                    env, call, **named), env)
                for member in range(2):
                    env.reset(seed=seed, options={"member": member})
        assert len({named["seed"] for named in asked}) == 9
        assert all(0 <= named["seed"] < 2**31 for named in asked)

    def test_the_field_of_the_text_is_found_or_asked_for(self, others):
        assert make(f"{others}/echo").reset() == (
            "ready", {"success": 0.0, "valid": 1.0, "effective": 0.0})
        for name, said in (("arena", "which field of its observations is the text? Give --env-arg "
                                     "observation=NAME: prompt, messages."),
                           ("tools", "no field of its actions is text")):
            assert said in refusal(make, f"{others}/{name}")
        env = make(f"{others}/arena", observation="prompt,messages", instruction="Guess.")
        assert (env.reset()[0], env.system_prompt) == ("Rules\nRules", "Guess.")
        assert env.step("crane")[0] == "Rules\ncrane\nWrong"

    def test_sessions_end_with_their_rows(self, others):
        """/one has room for one."""
        for _ in range(3):
            groups = PatientGroups(f"{others}/one", 1, 1)
            for _attempt in range(50):  # the server notices a little later
                (first,) = groups.reset(0)
                if first == "ready":
                    break
                time.sleep(0.1)
            assert first == "ready"
        full = PatientGroups(f"{others}/one", 1, 1).reset(0)[0]
        assert "Server at capacity: 1/1 sessions active." in str(full)


class TestFailures:
    def test_a_server_that_stalls_crashes_or_floods_ends_one_episode(self, others, monkeypatch):
        monkeypatch.setattr(limits, "STEP_TIME_LIMIT", 1.0)
        monkeypatch.setattr(os, "cpu_count", lambda: 1)
        groups = PatientGroups(f"{others}/guess=3,{others}/echo=1", 4, 1)
        groups.reset(0)
        stalled, crashed, fine, huge = groups.step(
            range(4), replies(["stall", "crash", "1", "huge"]))
        assert "no answer in 1 seconds" in str(stalled) and fine[0] in ("yes", "no")
        assert re.search(r"Server error: no \[2J!+$", str(crashed)) and len(str(crashed)) < 400
        assert "frame exceeds limit of 4194304 bytes" in str(huge)
        assert not any(isinstance(error, ServerGone) for error in (stalled, crashed, huge))
        assert all(isinstance(first, str) for first in groups.reset(1))

    def test_a_step_is_never_played_in_another_session(self, others):
        env = make(f"{others}/echo")
        env.reset()
        asyncio.run_coroutine_threadsafe(env._client._ws.close(), env._loop).result()
        with pytest.raises(RuntimeError, match="the session was lost"):
            env.step("hi")
        assert env.reset()[0] == "ready" and env.step("hi")[1] == 0.1

    def test_a_server_killed_in_the_middle_of_an_episode_gives_no_reward(self, runs, monkeypatch):
        """Its episodes are errors; then it is waited for, the run saves and stops, and goes on."""
        base = parsed("--env", "bandit", "--run", "begun", "--steps", "1", *BRIEF)
        start.run(base, say=lambda _: None)
        monkeypatch.setattr(run_groups, "SERVER_PAUSES", (0.1, 0.1))
        options = words_of(base)
        words = f"--run gone --init-from begun {' '.join(BRIEF)} --steps 4 --max-new-tokens 24"
        send, collect, rounds = PatientGroups.send, start.collect, []
        monkeypatch.setattr(start, "collect", lambda *given: (
            rounds.append(given[2].split) or collect(*given)))
        with ours("bandit", *options) as (process, url):
            def killing(groups, *given):
                if rounds.count("train") == 2:
                    process.kill()
                    process.wait()
                send(groups, *given)

            monkeypatch.setattr(PatientGroups, "send", killing)
            said = message("--env", f"openenv:{url}", *words.split())
        assert said.startswith(f"error: {url}: Failed to connect")
        lines = read_lines(runs / "gone" / "metrics.jsonl")
        assert [line["env_errors"] for line in lines[1:]] == [0, 12]
        assert "episode_return" in lines[1] and "episode_return" not in lines[2]
        failed = [line for line in read_lines(runs / "gone" / "trajectories.jsonl")
                  if line["step"] == 2]
        assert {line["stop"] for line in failed} == {"env_error"}
        with ours("bandit", *options, "--port", url.rpartition(":")[2]):
            start.main(["--run", "gone", "--resume"])
        assert [line["step"] for line in metrics(runs / "gone")][-2:] == [4, 4]

    def test_a_bad_server_is_refused_at_the_start(self, others):
        schema = {what: {"properties": {"message": {"type": "string"}}}
                  for what in ("action", "observation")}
        good = {"/schema": json.dumps(schema), "/metadata": '{"name": "x", "description": "x"}'}
        elsewhere = others.removeprefix("openenv:http") + "/echo"
        for answer, said in (
                (lambda *_: (200, "", b"[" * 10**5), "Is it running?"),
                (lambda *_: (200, "", b"x" * 5_000_000), "endless reply"),
                (lambda *_: (200, "", b'{"action": 1}'), "Is it "),
                (lambda path, _: (302, f"http{elsewhere}{path}", b""), "HTTP Error 302")):
            with web_server(answer) as url:
                assert said in refusal(make, f"openenv:{url}")
        with (web_server(lambda path, _: (200, "", good[path].encode()) if path in good else
                         (302, f"ws{elsewhere}{path}", b"")) as url,
              pytest.raises(ServerGone, match="redirects")):
            make(f"openenv:{url}").reset()
        assert "expected openenv:http://host:port." in refusal(make, "openenv:file:///etc")
        assert "Connection refused" in refusal(make, "openenv:http://127.0.0.1:1")


def caller(dataset, environment):
    """The model and the tokenizer of a tiny Llama that has learnt by heart to call `play`."""
    import torch
    import trl
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = Tokenizer(models.BPE({c: i for i, c in enumerate(
        sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=letters, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        chat_template=(Path(trl.__file__).parent / "chat_templates/qwen2_5.jinja").read_text())
    call = '<tool_call>\n{"name": "play", "arguments": {"message": "', '"}}\n</tool_call>'
    tokenizer.add_tokens(["<|im_start|>", *call])
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=8192, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id))
    optimizer, env = torch.optim.Adam(model.parameters(), 1e-2), environment()
    for row, direction in zip(dataset.select(range(32)), ("Up", "Left", "Down", "Right") * 8):
        row["prompt"][0]["content"] += env.reset(**row)
        prompt, reply = (tokenizer(text)["input_ids"] for text in (
            tokenizer.apply_chat_template(row["prompt"], tools=[env.play], tokenize=False,
                                          add_generation_prompt=True),
            f"{call[0]}{direction}{call[1]}<|im_end|>"))
        ids = torch.tensor([prompt + reply])
        labels = ids.masked_fill(torch.arange(ids.shape[1]) < len(prompt), -100)
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "processing_class": tokenizer}


class TestTRL:
    @pytest.mark.filterwarnings("ignore")
    def test_its_trainer_takes_a_step_on_our_sokoban_as_the_page_shows(self, tmp_path, monkeypatch):
        """With a tiny Llama that has learnt by heart to call the tool with a random direction."""
        pytest.importorskip("trl")
        monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/openenv.md").read_text(),
                                re.DOTALL)
        small = ("max_steps=1, per_device_train_batch_size=8, max_tool_calling_iterations=1, "
                 "use_cpu=True, bf16=False, report_to='none', save_strategy='no', logging_steps=1, "
                 f"disable_tqdm=True, output_dir={str(tmp_path)!r}")
        with ours("sokoban") as (_, url):
            for shown, tested in (("http://127.0.0.1:8000", url), ("max_steps=200", small),
                                  ('"Qwen/Qwen3-0.6B"', "**caller(dataset, Sokoban)")):
                assert shown in program
                program = program.replace(shown, tested)
            names = {"caller": caller}
            exec(program, names)
        log = names["trainer"].state.log_history[0]
        assert log["tools/call_frequency"] > 0 and log["tools/failure_frequency"] == 0
        assert math.isfinite(log["loss"]) and log["grad_norm"] > 0
        assert log["rewards/Sokoban/mean"] < 0 < log["reward_std"]
