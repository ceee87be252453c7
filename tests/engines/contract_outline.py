"""An engine of outlines: just what the contract asks for, made from the contract itself."""

from collections import defaultdict


def outline(requirements):
    """Return ``{module: source}`` of a tree that meets the requirements, and has nothing else."""
    modules = defaultdict(lambda: defaultdict(list))
    for one in requirements:
        members = modules[one.module]
        if one.name:
            head, _, member = one.name.partition(".")
            members[head].append((member, one))
    return {
        module: "\n".join(_top(name, rows) for name, rows in members.items()) for module, members in modules.items()
    }


def plant(tree, requirements):
    """Write the outlines below a directory."""
    sources = outline(requirements)
    for module, source in sources.items():
        path = tree.joinpath(*module.split("."))
        if any(other.startswith(f"{module}.") for other in sources):
            path = path / "__init__"
        path = path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)


def _top(name, rows):
    methods = defaultdict(list)
    for member, one in rows:
        methods[member].append(one)
    if set(methods) == {""}:
        return _function(name, methods[""], own=())
    body = [_function(member, found, own=("self",)) for member, found in methods.items() if member]
    return "\n".join([f"class {name}:", *(f"    {line}" for text in body for line in text.splitlines())])


def _function(name, rows, own):
    parameters = sorted({parameter for one in rows for parameter in one.parameters})
    calls = sorted({call for one in rows for call in one.calls})
    stores = sorted({target for one in rows for target in one.stores})
    head = "async def" if any(one.coroutine for one in rows) else "def"
    listed = ", ".join([*own, *(["*", *parameters] if parameters else [])])
    body = [*(f"self.{call}()" for call in calls), *(f"self.{target} = None" for target in stores)] or ["..."]
    return "\n".join([f"{head} {name}({listed}):", *(f"    {line}" for line in body)])
