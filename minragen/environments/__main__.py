"""Print the solver's episode in an environment: `python -m minragen.environments sokoban 0`."""

import sys

from minragen.envs import make


def transcript(name, seed=0, split="train", **options):
    """The solver's episode as text: prompt, answers, observations."""
    env = make(name, split, **options)
    observation, _ = env.reset(seed=seed)
    lines, over = [env.system_prompt, "", observation], False
    while not over:
        answer = env.solve()[0]
        observation, _, terminated, truncated, _ = env.step(answer)
        lines += [f"<answer> {answer} </answer>", observation]
        over = terminated or truncated
    return "\n".join(lines)


if __name__ == "__main__":
    name, seed = [*sys.argv[1:], *("frozenlake", "0")[len(sys.argv) - 1:]][:2]
    if len(sys.argv) > 3 or not seed.isdecimal():
        sys.exit("usage: python -m minragen.environments [ENV [SEED]]")
    try:
        print(transcript(name, int(seed)))
    except (ValueError, ImportError, NotImplementedError) as problem:
        sys.exit(f"error: {problem}")
