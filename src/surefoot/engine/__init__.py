"""The parts joined: the step loop, the running of requests, statistics, and `Engine`, the way in."""

from surefoot.engine.engine import Engine
from surefoot.engine.generation import Generation
from surefoot.engine.stats import Stats

__all__ = ["Engine", "Generation", "Stats"]
