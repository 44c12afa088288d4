"""In the terminal: a person plays, a run's policy plays, or the solver does.

    python -m minragen play sokoban --seed 3         (or: make play ENV=sokoban)
    python -m minragen play --run my-run --seed 3    (or: make play RUN=my-run)
    python -m minragen environments sokoban 0        the solver's episode
"""

import contextlib
import itertools

from minragen.environments.board import Board
from minragen.envs import make
from minragen.look.faults import Parser, printable
from minragen.support.formats import forced_prefix

SHOWN = 3  # instances of a run's policy


def play(name, split, seed, options, ask=input, say=print):
    """Let a person play seed, seed + 1, ... with the policy's prompts and rewards, until Ctrl-D."""
    env = make(name, split, **options)
    grid = env.grid if isinstance(env.unwrapped, Board) else str
    say("Type the text inside <answer>. A line that ends in \\ goes on; ? shows the solver's "
        "answer; Ctrl-D ends.\n")

    with contextlib.suppress(EOFError):
        for instance in itertools.count(seed):
            observation, earned, over = env.reset(seed=instance)[0], 0.0, False
            say(f"--- {name}, {split} seed {instance}\n{env.system_prompt}\n\n"
                f"{shown(observation, grid())}")
            while not over:
                answer = ask("> ")
                while answer.endswith("\\"):
                    answer = answer[:-1] + "\n" + ask("  ")
                if answer.strip() in ("", "?"):  # neither costs a turn
                    say(env.solve()[0] if answer.strip() else "Type an answer.")
                    continue
                observation, reward, terminated, truncated, info = env.step(answer)
                earned, over = earned + reward, terminated or truncated
                say(f"\n{shown(observation, grid())}")
            say(f"--- {'success' if info.get('success') else 'no success'}, return {earned:.4g}\n")


def show_run(run, config, groups, policy_plays, seed):
    """Print SHOWN instances from `seed` on (of a mixture more, to end a round of its environments),
    turn by turn, sampled as `make eval` does.

    groups: one row for each environment      policy_plays: as evaluate's `play`
    """
    print(f"run {run} plays {config.env}, sampled at temperature {config.val_temperature:g} "
          f"(greedy: --temperature 0).")
    for first in range(seed, seed + SHOWN, len(groups)):
        (played,) = policy_plays(groups, False, first).values()
        for env, t in zip(groups.envs, played):
            prompt = f"\n{env.system_prompt}\n" if first == seed else ""
            print(f"\n--- {t.env}, {groups.split} seed {t.seed}{prompt}")
            print(episode_text(t, forced_prefix(config.response_format), boards_of(env, t)))


def boards_of(env, t):
    """The board before each turn of a Trajectory and after the last, as symbols; "" for none."""
    boards = [""] * (1 + len(t.turns))
    if isinstance(env.unwrapped, Board):
        env.reset(seed=t.seed, options={"member": t.member})
        for k in range(len(boards)):
            boards[k] = env.grid()
            if k < len(t.turns) - bool(t.error):  # the last answer may have failed there
                env.step(t.turns[k].reply.answer)
    return boards


def episode_text(t, prefix, boards):
    """A Trajectory as text: what its policy saw and replied, and what it earned.

    prefix: of every reply, never sampled
    """
    lines = []
    for turn, board in zip(t.turns, boards):
        lines += [shown(turn.observation, board), f"> {prefix}{printable(turn.text)}\n"]
    if t.error:
        lines.append(f"{t.fault.traceback}{t.fault}")
    end = "env error" if t.error else "success" if t.success else "no success"
    rewards = " + ".join(f"{reward:.4g}" for reward in t.turn_rewards)
    return "\n".join([*lines, shown(t.observation, boards[-1]),
                      f"--- {end}, return {t.episode_return:.4g}"
                      f"{f' = {rewards}' if len(t.turns) > 1 else ''}"])


def shown(observation, board=""):
    """An observation for a terminal, with the board, if the model sees coordinates or an image."""
    text = printable(observation)
    return text if board in text else f"{text}\n{board}"


def transcript(name, seed):
    """The solver's episode as text: prompt, answers, observations."""
    env, over = make(name), False
    observation, _ = env.reset(seed=seed)
    lines = [env.system_prompt, "", observation]
    while not over:
        answer = env.solve()[0]
        observation, _, terminated, truncated, _ = env.step(answer)
        lines += [f"<answer> {answer} </answer>", observation]
        over = terminated or truncated
    return "\n".join(lines)


def environments(argv):
    """The command: print the solver's episode in an environment."""
    parser = Parser(prog="minragen environments", description="Print the solver's episode.")
    parser.add_argument("env", nargs="?", default="frozenlake", help="as in training [frozenlake]")
    parser.add_argument("seed", nargs="?", type=int, default=0, help="of the instance [0]")
    args = parser.parse_args(argv)
    if not 0 <= args.seed <= 2**62:
        parser.error(f"seed: got {args.seed}, expected 0 to 2**62")
    print(transcript(args.env, args.seed))
