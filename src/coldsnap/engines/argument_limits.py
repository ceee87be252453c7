"""Arguments of engines, as far as this library owns or refuses them.

The one rule: limits are data, read by ``refusals`` and by whoever writes the list of limits. An argument that is not
named is the user's business and reaches the engine unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import field, frozen

__all__ = ["MODEL_LIMITS", "ONE", "ConfigLimit", "Limit", "Limits", "last_value", "options", "owned"]

ONE = ("1",)


@frozen(kw_only=True)
class Limit:
    """An argument, or an environment name, that is refused.

    Attributes:
        names: All its spellings; a trailing ``*`` stands for any ending.
        why: The reason, as a sentence without its subject.
        works: What to do instead.
        allowed: Values that are not refused; empty means that its presence is.
    """

    names: tuple[str, ...]
    why: str
    works: str
    allowed: tuple[str, ...] = ()

    def refuses(self, name: str, value: str) -> bool:
        """Tell whether this argument, with this value, is refused."""
        return self.spells(name) and value not in self.allowed

    def spells(self, name: str) -> bool:
        """Tell whether ``name`` is one of the spellings."""
        return any(name == known or (known.endswith("*") and name.startswith(known[:-1])) for known in self.names)


def owned(*names: str, works: str) -> Limit:
    """Return the limit of arguments that this library sets."""
    return Limit(names=names, why="is set by this library", works=works)


@frozen
class Limits:
    """All limits of one command line.

    Attributes:
        rows: The limits; the first that spells a name decides.
        complete: Options of their own that are also the beginning of a refused one.
    """

    rows: tuple[Limit, ...]
    complete: frozenset[str] = field(default=frozenset(), kw_only=True)

    def of(self, args: Sequence[str]) -> Iterator[tuple[str, Limit]]:
        """Find the arguments that are refused.

        Yields:
            The argument as it was written, without its value, and the limit.
        """
        for name, value in options(args):
            for limit in self.rows:
                if limit.refuses(name, value) or self._abbreviates(name, limit):
                    yield name, limit
                    break
                if limit.spells(name):
                    break  # an allowed value of a name that a later, wider row also spells

    def of_variable(self, name: str, value: str) -> Limit | None:
        """Return the limit that refuses an environment variable, if one does."""
        return next((limit for limit in self.rows if limit.refuses(name, value)), None)

    def _abbreviates(self, name: str, limit: Limit) -> bool:
        # argparse takes any unambiguous beginning of an option for the option.
        return (
            name.startswith("--")
            and len(name) > len("--e")
            and name not in self.complete
            and any(known.startswith(name) and known != name and not known.endswith("*") for known in limit.names)
        )


@frozen(kw_only=True)
class ConfigLimit:
    """A kind of model that is refused, recognised by a key of its ``config.json``.

    Attributes:
        key: The key; its presence with a value that is not null refuses the model.
        why: The reason.
        works: What to do instead.
    """

    key: str
    why: str
    works: str


MODEL_LIMITS: tuple[ConfigLimit, ...] = (
    ConfigLimit(
        key="quantization_config",
        why="has quantised weights, which are not qualified yet",
        works="bfloat16, float16 or float32 weights",
    ),
    *(
        ConfigLimit(key=key, why="is multimodal, which is not qualified yet", works="a text model")
        for key in ("vision_config", "audio_config", "thinker_config", "visual")
    ),
)


def options(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Read a command line as the engines' parsers do: ``--a_b=c``, ``--a-b c`` and ``--a-b`` give ``("--a-b", value)``.

    Args:
        args: The arguments.

    Yields:
        Each option with its value, empty when none follows.
    """
    for index, argument in enumerate(args):
        if not argument.startswith("-") or argument.lstrip("-.").isdigit():
            continue
        name, equals, value = argument.partition("=")
        if not equals and index + 1 < len(args) and not args[index + 1].startswith("-"):
            value = args[index + 1]
        yield (name.replace("_", "-") if name.startswith("--") else name), value


def last_value(args: Sequence[str], *names: str, default: str) -> str:
    """Return the value of an option, which is the last one given."""
    return next((value for name, value in reversed(list(options(args))) if name in names), default)
