"""Print the solver's episode in an environment: `python -m minragen.environments sokoban 0`."""

import sys

from minragen.envs import make
from minragen.look.faults import Parser, told


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
    parser = Parser(prog="minragen.environments", description=__doc__)
    parser.add_argument("env", nargs="?", default="frozenlake", help="as in training [frozenlake]")
    parser.add_argument("seed", nargs="?", default="0", help="of the instance [0]")
    args = parser.parse_args()
    if not args.seed.isdecimal():
        parser.error(f"seed: got {args.seed!r}, expected a number such as 0")
    try:
        print(transcript(args.env, int(args.seed)))
    except Exception as problem:
        sys.exit(told(problem))
