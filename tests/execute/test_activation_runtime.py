"""A fix of this library reaches a captured template: what runs in the ranks is staged, and used by its path."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from attrs import evolve
from lab import ask, tagged

import coldsnap as cs
from coldsnap.artifact.tree import Trees
from coldsnap.errors import IntegrityError
from coldsnap.keeper.activation import activation_files

pytestmark = pytest.mark.criu


@pytest.fixture
def environment(tmp_path, engine_python):
    """An engine's environment with a coldsnap of its own, which a test may spoil."""
    root = tmp_path / "environment"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site, (inherited,) = (
        root / "lib" / version / "site-packages",
        Path(engine_python).parents[1].glob("lib/*/site-packages"),
    )
    for name, data in activation_files().items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(data)
    (site / "engine.pth").write_text(f"import site; site.addsitedir({str(inherited)!r})\n")
    base = Path(os.path.realpath(engine_python))
    (root / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    (root / "bin").mkdir()
    (root / "bin" / "python").symlink_to(base)
    return SimpleNamespace(python=str(root / "bin" / "python"), package=site / "coldsnap")


def test_a_template_runs_the_runtime_that_restores_and_a_damaged_one_is_refused(lab, environment):
    captured = lab.capture(
        evolve(lab.engine(), python=environment.python), policy={"compatibility.driver": "n580"}, then="keep"
    )
    with captured.engine as kept:
        answer = ask(kept)
    artifact = cs.Artifact.open(captured.artifact)
    # What the engine's environment has now could not serve.
    (environment.package / "testing" / "reference_server.py").write_text("raise SystemExit('of another time')\n")

    report = lab.restore(artifact)

    assert ask(report.engine) == answer
    staged = report.receipt("stage-runtime")
    tree = Path(staged.effective)
    assert Trees(tree.parents[2]).verify(f"sha256:{tree.name}").bytes == staged.bytes
    assert (tree / "coldsnap" / "testing" / "reference_server.py").stat().st_mode & 0o777 == 0o444
    assert tree.stat().st_mode & 0o777 == 0o555
    report.engine.stop()

    spoiled = tree / "coldsnap" / "engines" / "rank.py"
    spoiled.chmod(0o644)
    spoiled.write_bytes(spoiled.read_bytes() + b"# changed\n")
    spoiled.chmod(0o444)
    with pytest.raises(IntegrityError, match="rank.py: a file of a staged tree is not the archive's"):
        lab.restore(artifact)
    assert not tagged(lab.tag)
