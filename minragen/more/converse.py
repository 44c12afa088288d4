"""Episodes of players that sample no tokens here: a script, or a model behind a server.

Tests: `python -m pytest tests/test_api.py tests/test_eval.py`.
"""

from minragen.trajectory import StopReason


def converse(step, trajectories, player):
    """Play fresh Trajectories to their ends.

    step: (rows, Replies) -> outcomes, as EnvGroups.step
    player: Trajectory -> (text, Reply), or None to leave the conversation as it is
    """
    while said := [(t, *turn) for t in trajectories if not t.stop and (turn := player(t))]:
        outcomes = step([t.env_index for t, _, _ in said], [reply for _, _, reply in said])
        for (t, text, reply), outcome in zip(said, outcomes):
            t.end_turn(text, reply, StopReason.END_OF_TURN, outcome)
            if t.stop:
                t.end()
