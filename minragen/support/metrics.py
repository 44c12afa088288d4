"""Metrics of played episodes, before any filter. docs/metrics.md explains each.

Tests: `python -m pytest tests/test_train.py -k Describe`.
"""

from minragen.trajectory import StopReason

HELD_OUT = ("success", "episode_return", "valid", "grounding", "worldmodeling", "env_errors")


def episode_metrics(trajectories):
    """Metrics of the episodes, before any filter; of a mixture also for each environment.

    Episodes whose environment failed are counted in `env_errors` and enter nothing else.
    """
    def means(chosen, prefix=""):
        errors = {prefix + "env_errors": sum(bool(t.error) for t in chosen)}
        chosen = [t for t in chosen if not t.error]
        if not chosen:
            return errors
        solved = {t.group_id for t in chosen if t.success}
        values = {"success": [t.success for t in chosen],
                  "episode_return": [t.episode_return for t in chosen],
                  "turns": [len(t.turns) for t in chosen],
                  "response_tokens": [t.response_tokens for t in chosen],
                  "context_full": [t.stop is StopReason.CONTEXT for t in chosen],
                  "pass@G": [group in solved for group in {t.group_id for t in chosen}]}
        # What not all environments report is left out of the mixture's own metrics.
        reported = [set().union(*(t.metrics for t in chosen if t.env == env))
                    for env in {t.env for t in chosen}]
        for name in sorted(set.intersection(*reported) - values.keys() - {"step"}):
            values[name] = [t.metrics.get(name, 0.0) for t in chosen]
        return errors | {prefix + name: sum(x) / len(x) for name, x in values.items()}

    metrics, names = means(trajectories), sorted({t.env for t in trajectories})
    for name in names if len(names) > 1 else ():
        metrics |= means([t for t in trajectories if t.env == name], f"{name}/")
    return metrics


def waiting_metrics(trajectories):
    """What a rollout waited for; {} if nothing was sampled.

    rollout_idle: the share of the time from the first prompt to the last result in which no row was
        fed or sampled, in any process
    waited: mean seconds from sending a reply to its result; of a mixture also for each environment
    """
    turns = {}  # environment -> the times of its turns
    for t in trajectories:
        turns.setdefault(t.env, []).extend(turn.times for turn in t.turns)
    times = sorted(sum(turns.values(), []))
    if not times:
        return {}
    busy, until = 0.0, times[0][0]
    for fed, sent, _ in times:
        busy, until = busy + max(0.0, sent - max(fed, until)), max(until, sent)
    whole = max(returned for *_, returned in times) - times[0][0]
    every = {"": times} | {f"{env}/": own for env, own in turns.items() if own and len(turns) > 1}
    return {"rollout_idle": 1 - busy / whole if whole > 0 else 0.0} | {  # a clock may stand still
        f"{prefix}waited": sum(returned - sent for _, sent, returned in own) / len(own)
        for prefix, own in every.items()}


def held_out_metrics(split, trajectories):
    """`val/success`, `val/valid`, ... of a validation; of a mixture also `val/ENV/success`."""
    return {f"{split}/{name}": value for name, value in episode_metrics(trajectories).items()
            if name.rpartition("/")[2] in HELD_OUT}
