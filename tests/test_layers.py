"""Imports go down only."""

import ast
from pathlib import Path

import pytest

import coldsnap

PACKAGE = Path(coldsnap.__file__).parent

# Lowest first.
LAYERS = [
    ["errors"],
    ["policy"],
    ["host"],
    ["artifact"],
    ["transfer"],
    [
        *["placement", "subjects", "operation", "receipts", "phases", "freezing", "shelving", "moving", "templating"],
        *["steps", "plan"],
    ],
    ["keeper"],
    ["drivers", "engines"],
    ["admission", "behaviour", "describe", "planning", "upkeep", "resolve"],
    [
        *[
            "runner",
            "session",
            "accelerating",
            "outside",
            "releasing",
            "shrinking",
            "sealing",
            "capturing",
            "launching",
            "curating",
            "hydrating",
            "recovering",
        ],
        *["anew", "restoring", "starting", "dozing", "materializing", "repacking", "warming", "seeding"],
        *["execute", "progress", "diagnosing"],
    ],
    ["testing"],
]
# Modules on one line may import one another; drivers and engines never do.
TOGETHER = [set(names) for names in LAYERS if names != ["drivers", "engines"]]
RANK = {name: number for number, names in enumerate(LAYERS) for name in names}

HEAVY = {"torch", "vllm", "sglang", "huggingface_hub"}
PURE = [
    "errors",
    "policy",
    "host/facts",
    "host/contracts",
    "artifact/extents",
    "plan",
    "steps",
    "operation",
    "receipts",
    "planning",
    "resolve",
]


def imports(path: Path, *, typing_only: bool = False) -> set[str]:
    """Return the modules a file imports at run time, ``if TYPE_CHECKING`` blocks left out."""
    found = set()
    tree = ast.parse(path.read_text())
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped.update(id(inner) for stmt in node.body for inner in ast.walk(stmt))
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            if node.module == "coldsnap":
                found.update(f"coldsnap.{alias.name}" for alias in node.names)
    return found


def part(module: str) -> str | None:
    """Return the layer name of a module path such as coldsnap.host.probe."""
    pieces = module.split(".")
    return pieces[1] if pieces[0] == "coldsnap" and len(pieces) > 1 else None


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py" or path.parent != PACKAGE)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down_only(path):
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]

    assert own in RANK, f"{own} has no place in the layers: add it to LAYERS and docs/architecture.md"

    for module in imports(path):
        other = part(module)
        if other is None or other == own:
            continue
        together = any({own, other} <= names for names in TOGETHER)
        assert together or RANK[other] < RANK[own], f"{path.name} imports {module}, which is not below {own}"


@pytest.mark.parametrize("name", PURE)
def test_pure_parts_import_no_engine(name):
    root = PACKAGE / name
    for path in root.rglob("*.py") if root.is_dir() else [root.with_suffix(".py")]:
        assert not {module.split(".")[0] for module in imports(path)} & HEAVY, path


def test_only_named_modules_read_the_environment():
    # What the CUDA driver lists depends on the environment, so a listing that was kept does too.
    # A template is not the library any more, but the engine's own process, whose environment it places.
    # The C library reads for itself what is said about its heap.
    allowed = {"engines/settings.py", "host/gpus.py", "keeper/template.py", "testing/reference_worker.py"}
    allowed |= {"transfer/heap.py"}

    offenders = {
        str(path.relative_to(PACKAGE))
        for path in FILES
        if any(word in path.read_text() for word in ("os.environ", "os.getenv", "environb"))
    }

    assert offenders <= allowed


def test_only_the_native_binding_touches_ctypes_and_the_kernel_ones_say_so():
    allowed = {
        "transfer/native.py",
        "transfer/native_images.py",
        "transfer/interface.py",
        "transfer/heap.py",
        "keeper/kernel.py",
        "drivers/handles.py",
        "drivers/cuda_driver.py",
        "engines/freshness.py",  # the C library's generators
        "testing/reference_worker.py",  # the same, to look at them
    }

    offenders = {
        str(path.relative_to(PACKAGE)) for path in FILES if "ctypes" in {m.split(".")[0] for m in imports(path)}
    }

    assert offenders <= allowed


def test_only_named_modules_start_processes():
    allowed = (
        "drivers/criu.py",
        "drivers/cuda.py",
        "keeper/",
        "engines/environment.py",
        "host/",
        "testing/",
        "artifact/validate.py",
    )

    offenders = [
        str(path.relative_to(PACKAGE))
        for path in FILES
        if {"subprocess", "multiprocessing"} & {m.split(".")[0] for m in imports(path)}
        and not str(path.relative_to(PACKAGE)).startswith(allowed)
    ]

    assert offenders == []
