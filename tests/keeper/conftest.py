"""Fixtures: a world in private namespaces, or in both kinds."""

from keeper_world import make_private as private
from keeper_world import make_world as world

__all__ = ["private", "world"]
