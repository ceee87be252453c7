"""A plan: what will be done, step by step, and every decision that led there.

A plan is data. It prints, compares, serialises and has a digest; it is made by ``resolve`` and run by ``execute``,
which may choose among the listed options of a ``Choice`` and decides nothing else.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args, get_origin

from attrs import asdict, fields, frozen, resolve_types

from coldsnap.errors import FormatError
from coldsnap.receipts import Report
from coldsnap.steps import STEP_CLASSES, Step

if TYPE_CHECKING:
    from attrs import AttrsInstance

__all__ = ["Barrier", "Choice", "Decision", "Plan"]

PLAN_FORMAT = 1

T = TypeVar("T")


@frozen(kw_only=True)
class Decision:
    """Something that ``resolve`` settled.

    Attributes:
        name: What was decided; a policy path where there is one.
        requested: What the policy said, ``auto`` included; empty when nobody asked.
        layer: Who said it: library, driver, engine, profile or user.
        effective: What holds.
        reason: Why, in words.
    """

    name: str
    requested: str
    layer: str
    effective: str
    reason: str


@frozen(kw_only=True)
class Choice:
    """Something that can be settled only while the plan runs.

    Attributes:
        name: What is chosen.
        step: The id of the step that chooses.
        options: What may be chosen.
        rule: How, in words.
    """

    name: str
    step: str
    options: tuple[str, ...]
    rule: str


@frozen(kw_only=True)
class Barrier:
    """A point that all units reach before any goes on.

    Attributes:
        name: CRIU_RESTORED, CUDA_RESTORED, RESUMED, HYDRATED or ACCEPTED.
        step: The id of the step after which it stands.
    """

    name: str
    step: str


@frozen(kw_only=True)
class Plan:
    """Steps with their order, decisions, choices and barriers.

    Attributes:
        operation: capture, restore, launch, stop, sleep, wake, status, verify, delete or publish.
        driver: The driver's id.
        subject: What it is about, in words: the engine or artifact, and where.
        steps: In an order that respects ``after``.
        decisions: What was settled, with reasons.
        choices: What is settled while the plan runs.
        barriers: Where units wait for each other.
    """

    operation: str
    driver: str
    subject: str
    steps: tuple[Step, ...]
    decisions: tuple[Decision, ...] = ()
    choices: tuple[Choice, ...] = ()
    barriers: tuple[Barrier, ...] = ()

    def __attrs_post_init__(self) -> None:
        seen: set[str] = set()
        for step in self.steps:
            if step.id in seen or not set(step.after) <= seen:
                msg = f"step {step.id!r} is listed twice or before one it waits for ({', '.join(step.after)})"
                raise ValueError(msg)
            seen.add(step.id)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __getitem__(self, step_id: str) -> Step:
        for step in self.steps:
            if step.id == step_id:
                return step
        raise KeyError(step_id)

    def decision(self, name: str) -> Decision:
        """Return the decision called ``name``.

        Raises:
            KeyError: Nothing of that name was decided.
        """
        for decision in self.decisions:
            if decision.name == name:
                return decision
        raise KeyError(name)

    @property
    def digest(self) -> str:
        """Return ``sha256:<hex>`` over the canonical JSON of the plan."""
        return f"sha256:{hashlib.sha256(self.to_json(indent=None).encode()).hexdigest()}"

    # -- text -------------------------------------------------------------------------------------------------------

    def explain(self, *, earlier: Report | None = None) -> str:
        """Return the plan as text for people.

        Args:
            earlier: The report of an earlier run; its receipts give each step's cost. Without one, costs are unknown.
        """
        costs = {} if earlier is None else {receipt.step: f"{receipt.seconds:.2f} s" for receipt in earlier.receipts}
        lines = [f"{self.operation} with {self.driver}: {self.subject}"]
        phase = ""
        for step in self.steps:
            if step.phase != phase:
                phase = step.phase
                lines.append(f"  {phase}")
            after = f"  after {', '.join(step.after)}" if step.after else "  at once"
            lines.append(f"    {step.id:<18} {costs.get(step.id, 'cost unknown'):>12}{after}")
            lines.append(f"        {_sentence(step)}")
            lines.extend(f"        {shown}" for shown in _arguments(step))
            lines.extend(f"        barrier {barrier.name}" for barrier in self.barriers if barrier.step == step.id)
        if self.choices:
            lines.append("  chosen while it runs")
            lines.extend(f"    {choice.name}: {' | '.join(choice.options)}: {choice.rule}" for choice in self.choices)
        lines.append("  decided")
        for decision in self.decisions:
            asked = f"{decision.requested} ({decision.layer}) → " if decision.requested else ""
            lines.append(f"    {decision.name}: {asked}{decision.effective}: {decision.reason}")
        lines.append(f"  {self.digest}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.explain()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text("Plan(…)" if cycle else self.explain())

    def diff(self, other: Plan) -> str:
        """Return the difference between two plans as unified-diff text, empty when they are equal."""
        ours, theirs = (_without_digest(plan.explain()) for plan in (self, other))
        return "\n".join(difflib.unified_diff(ours, theirs, "this plan", "other plan", lineterm="", n=1))

    # -- JSON -------------------------------------------------------------------------------------------------------

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return the plan as JSON text; with ``indent=None`` in the canonical form that the digest is made of."""
        data = asdict(self, recurse=True)
        data["format"] = PLAN_FORMAT
        data["steps"] = [{"step": type(step).__name__, **asdict(step)} for step in self.steps]
        separators = (",", ":") if indent is None else None
        return json.dumps(
            data, sort_keys=True, ensure_ascii=True, allow_nan=False, indent=indent, separators=separators
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan.

        Raises:
            FormatError: The text is not a plan of this format; nothing unknown is accepted.
        """
        try:
            data = json.loads(text)
            return cls(
                steps=tuple(_step(dict(item)) for item in data.pop("steps")),
                decisions=tuple(_typed(Decision, item) for item in data.pop("decisions")),
                choices=tuple(_typed(Choice, item) for item in data.pop("choices")),
                barriers=tuple(_typed(Barrier, item) for item in data.pop("barriers")),
                **_head(data),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(f"not a plan: {error}", path="plan", rule="plan.1") from error


def _head(data: dict[str, Any]) -> dict[str, str]:
    if data.pop("format") != PLAN_FORMAT:
        raise ValueError(f"expected format {PLAN_FORMAT}")
    if unknown := sorted(data.keys() - {"operation", "driver", "subject"}):
        raise ValueError(f"unknown: {', '.join(unknown)}")
    if not all(isinstance(value, str) for value in data.values()):
        raise TypeError("operation, driver and subject must be texts")
    return data


def _step(data: dict[str, Any]) -> Step:
    return _typed(STEP_CLASSES[data.pop("step")], data)


def _typed(cls: type[T], data: dict[str, Any]) -> T:
    """Build ``cls`` from JSON values; attrs checks names but not types."""
    made = cls(**{name: _tuples(value) for name, value in data.items()})
    resolve_types(cast("type[AttrsInstance]", cls))
    for attribute in fields(cast("type[AttrsInstance]", cls)):
        value, wanted = getattr(made, attribute.name), attribute.type
        if not _fits(value, wanted):
            raise TypeError(f"{cls.__name__}.{attribute.name}: expected {wanted}, found {value!r}")
    return made


def _fits(value: Any, wanted: Any) -> bool:
    """Tell whether a value is of a field's type: only those that steps and decisions have."""
    if get_origin(wanted) is Literal:
        return type(value) is str and value in get_args(wanted)
    if get_origin(wanted) is tuple:
        items = get_args(wanted)
        if not isinstance(value, tuple) or (items[-1] is not Ellipsis and len(items) != len(value)):
            return False
        each = items[:1] * len(value) if items[-1] is Ellipsis else items
        return all(_fits(item, kind) for item, kind in zip(value, each, strict=True))
    if wanted is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is wanted


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _sentence(step: Step) -> str:
    return (type(step).__doc__ or "").split("\n", 1)[0]


def _arguments(step: Step) -> Iterator[str]:
    for attribute in fields(type(step)):
        if attribute.name in ("id", "after"):
            continue
        value = getattr(step, attribute.name)
        if value in ("", ()):
            continue
        if attribute.name in ("environment", "spec"):
            value = (
                ", ".join(name for name, _ in value) if attribute.name == "environment" else "kept beside the engine"
            )
        elif isinstance(value, tuple):
            value = " ".join(str(item) for item in value)
        yield f"{attribute.name}: {value}"


def _without_digest(text: str) -> list[str]:
    return text.splitlines()[:-1]
