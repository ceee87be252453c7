"""What a plugin relies on in an engine, checked by structure.

The check reads source files and imports nothing, so that it answers for any tree, also one that cannot run here.

The one rule: there is no version gate: a version that has everything is good, whatever its number.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Sequence

from attrs import frozen

from coldsnap.errors import ContractError

__all__ = ["Finding", "Report", "Requirement", "Trees", "parse", "report"]


@frozen(kw_only=True)
class Requirement:
    """One object that must be there.

    Attributes:
        module: Its module, below the package, with dots.
        name: ``Class``, ``Class.method``, ``Class.field`` or ``function``; empty for the module itself.
        coroutine: Whether it must be an ``async def``.
        parameters: Names it must accept.
        calls: Names it must call: ``self.x`` as ``x``.
        stores: Attributes of ``self`` that it must set.
        instead: The same thing in another release, which is as good.
        why: What the plugin uses it for.
    """

    module: str
    name: str = ""
    coroutine: bool = False
    parameters: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    stores: tuple[str, ...] = ()
    instead: Requirement | None = None
    why: str

    def __str__(self) -> str:
        return f"{self.module}{':' if self.name else ''}{self.name}"


@frozen(kw_only=True)
class Finding:
    """What was found for one requirement.

    Attributes:
        package: Whose module it is.
        requirement: The requirement.
        lacks: What is wrong with it, as a sentence without its subject; empty when it is met.
    """

    package: str
    requirement: Requirement
    lacks: str = ""

    def __str__(self) -> str:
        return f"{self.package}.{self.requirement} {self.lacks or 'is as expected'} ({self.requirement.why})"


@frozen(kw_only=True)
class Report:
    """A contract, held against one tree.

    Attributes:
        engine: Its name, for people.
        tree: The directory of the package.
        version: Its version, when known; only for reading.
        findings: One for each requirement.
    """

    engine: str
    tree: str
    version: str
    findings: tuple[Finding, ...]

    @property
    def missing(self) -> tuple[str, ...]:
        """Return what is not as expected, in words."""
        return tuple(str(finding) for finding in self.findings if finding.lacks)

    def require(self) -> None:
        """Demand that every requirement is met.

        Raises:
            ContractError: With everything that is not.
        """
        if self.missing:
            raise ContractError(
                f"{self.engine} {self.version} in {self.tree} lacks what the plugin relies on:", self.missing
            )


def report(
    contract: Sequence[Requirement], tree: str | os.PathLike[str], *, engine: str, package: str, version: str = ""
) -> Report:
    """Hold a contract against a tree.

    Args:
        contract: What must be there.
        tree: The directory of the package.
        engine: The engine's name, for people.
        package: The package's name.
        version: Its version, for the report.
    """
    trees = Trees(os.fspath(tree))
    findings = [Finding(package=package, requirement=one, lacks=trees.lacks(one)) for one in contract]
    return Report(engine=engine, tree=os.fspath(tree), version=version, findings=tuple(findings))


class Trees:
    """The syntax trees of one package, each parsed once.

    Args:
        root: The directory of the package.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._modules: dict[str, ast.Module | None] = {}

    def lacks(self, requirement: Requirement) -> str:
        """Say what a requirement lacks here; empty when it, or what is as good, is met."""
        if requirement.module not in self._modules:
            self._modules[requirement.module] = parse(self._root, requirement.module)
        lacks = _lacks(self._modules[requirement.module], requirement)
        return "" if lacks and requirement.instead and not self.lacks(requirement.instead) else lacks


def parse(tree: str, module: str) -> ast.Module | None:
    """Return the syntax tree of one module of a package, None when it has no such module."""
    base = os.path.join(tree, *module.split("."))
    for path in (f"{base}.py", os.path.join(base, "__init__.py")):
        if os.path.isfile(path):
            with open(path, "rb") as file:
                return ast.parse(file.read(), filename=path)
    return None


def _lacks(module: ast.Module | None, requirement: Requirement) -> str:
    if module is None:
        return "does not exist"
    node: ast.AST | None = module
    for name in requirement.name.split(".") if requirement.name else ():
        node = _member(node, name)
    if node is None:
        return "does not exist"
    if requirement.coroutine and not isinstance(node, ast.AsyncFunctionDef):
        return "is not a coroutine"
    if absent := sorted(set(requirement.parameters) - _parameters(node)):
        return f"does not take {', '.join(absent)}"
    if absent := sorted(set(requirement.calls) - set(_calls(node))):
        return f"does not call {', '.join(absent)}"
    if absent := sorted(set(requirement.stores) - set(_stores(node))):
        return f"does not set {', '.join(absent)}"
    return ""


def _member(node: ast.AST | None, name: str) -> ast.AST | None:
    for child in getattr(node, "body", ()):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and child.name == name:
            return child
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name) and child.target.id == name:
            return child
        if isinstance(child, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in child.targets):
            return child
        if isinstance(child, ast.If | ast.Try) and (found := _member(child, name)) is not None:
            return found
    return None


def _parameters(node: ast.AST) -> set[str]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return set()
    return {argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}


def _calls(node: ast.AST) -> Iterator[str]:
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            if isinstance(call.func, ast.Name):
                yield call.func.id
            elif isinstance(call.func, ast.Attribute):
                yield call.func.attr


def _stores(node: ast.AST) -> Iterator[str]:
    for target in ast.walk(node):
        if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store):
            yield target.attr
