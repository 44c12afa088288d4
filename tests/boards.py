"""FrozenLake and Sokoban as images, in the contract of all environments."""

from minragen.environments.frozenlake import FrozenLake
from minragen.environments.sokoban import Sokoban


class Lake(FrozenLake):
    defaults = FrozenLake.defaults | {"view": "image"}


class Room(Sokoban):
    defaults = Sokoban.defaults | {"view": "image+text"}
