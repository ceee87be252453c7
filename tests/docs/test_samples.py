"""What the documents tell you to write works: samples run on the reference engine, and every name in them exists."""

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

import coldsnap as cs
from coldsnap.keeper.rundir import new_name
from coldsnap.testing.reference import ReferenceEngine

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    ROOT / "examples/README.md",
]
RUN = ["README.md", "docs/quickstart.md"]


def samples(path):
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


ALL = [(str(path.relative_to(ROOT)), text) for path in DOCUMENTS for text in samples(path)]


def dotted(node):
    """Return ``a.b.c`` of nested attributes, or None."""
    if isinstance(node, ast.Name):
        return node.id
    above = dotted(node.value) if isinstance(node, ast.Attribute) else None
    return f"{above}.{node.attr}" if above else None


def resolve(name):
    """Find what ``cs.X`` or ``coldsnap.a.b`` is."""
    first, *rest = name.split(".")
    found = cs if first in ("cs", "coldsnap") else import_module(first)
    for index, part in enumerate(rest):
        try:
            found = getattr(found, part)
        except AttributeError:
            found = import_module(".".join(["coldsnap", *rest[: index + 1]]))
    return found


@pytest.mark.parametrize(("document", "text"), ALL, ids=[f"{name}-{index}" for index, (name, _) in enumerate(ALL)])
def test_every_name_and_keyword_in_a_sample_exists(document, text):
    tree = ast.parse(text)

    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            exec(compile(ast.Module([node], []), document, "exec"), {})
        elif isinstance(node, ast.Attribute) and dotted(node) and dotted(node).startswith(("cs.", "coldsnap.")):
            resolve(dotted(node))
        if isinstance(node, ast.Call) and (dotted(node.func) or "").startswith("cs."):
            parameters = inspect.signature(resolve(dotted(node.func))).parameters
            if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
                assert {word.arg for word in node.keywords if word.arg} <= set(parameters)


@pytest.mark.criu
@pytest.mark.parametrize("document", RUN)
def test_the_samples_of_a_document_run_from_top_to_bottom(
    document, tmp_path, monkeypatch, criu, engine_python, free_ports, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy.toml").write_text("")
    (tmp_path / "artifacts").mkdir()
    text = "\n".join(samples(ROOT / document)).replace("import coldsnap as cs\n", "")
    for written, free in zip(("8000", "8001", "8002"), free_ports(3), strict=True):
        text = text.replace(f"port={written}", f"port={free}")
    text = text.replace('name="qwen3-8b"', f'name="{(name := new_name("sample"))}"')
    text = text.replace('attach("qwen3-8b")', f'attach("{name}")')
    # vLLM and CRIU are where this session has them; everything else is what the document says.
    public = {each: getattr(cs, each) for each in cs.__all__}
    public["VLLM"] = lambda *_, **__: ReferenceEngine(python=engine_python)
    public["probe"] = lambda: cs.probe(criu=criu)

    exec(compile(text, document, "exec"), {"cs": SimpleNamespace(**public)})

    assert "http://127.0.0.1:" in capsys.readouterr().out
    assert cs.Artifact.open("artifacts/qwen3-8b").descriptor.engine.kind == "reference"
