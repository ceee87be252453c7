"""The activation runtime: what an engine's interpreter finds first, and what happens when it is replaced."""

import os
import subprocess
import sys

import pytest

import coldsnap
from coldsnap.artifact.tree import Trees, pack_tree
from coldsnap.errors import IntegrityError
from coldsnap.keeper.activation import ACTIVATION, activation_environment, activation_files, place

LOOK = (
    "import coldsnap, importlib.metadata as m; "
    "print(coldsnap.__file__); print(m.version('coldsnap')); "
    "print([e.value for e in m.entry_points(group='vllm.general_plugins') if e.name == 'coldsnap'])"
)


@pytest.fixture(scope="module")
def files():
    files = activation_files()
    meta = next(name for name in files if name.endswith("METADATA"))
    version = meta.removeprefix("coldsnap-").partition(".dist-info")[0]
    return files, version


@pytest.fixture
def trees(tmp_path):
    return Trees(tmp_path / "store")


def found(tree_dir):
    env = activation_environment({"PATH": os.environ["PATH"]}, str(tree_dir))
    done = subprocess.run([sys.executable, "-c", LOOK], env=env, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.splitlines()


def fixed(files, version):
    """Another tree: the same code under another version, as a fix would be."""
    meta = f"coldsnap-{version}.dist-info"
    made = {name.replace(meta, f"coldsnap-{version}+fix.dist-info"): data for name, data in files.items()}
    name = f"coldsnap-{version}+fix.dist-info/METADATA"
    return {**made, name: made[name].replace(f"Version: {version}".encode(), f"Version: {version}+fix".encode())}


def test_an_archive_of_one_installation_is_always_the_same(files):
    assert pack_tree(activation_files()) == pack_tree(files[0])
    assert {"coldsnap/__init__.py", "coldsnap/engines/rank.py", "coldsnap/py.typed"} <= set(files[0])
    assert not any("__pycache__" in name for name in files[0])


def test_an_interpreter_finds_the_placed_runtime_before_the_installed_one(files, trees, tmp_path):
    tree = trees.add(files[0])
    place(tmp_path, ACTIVATION, trees, tree.sha256)

    where, version, plugin = found(tmp_path)

    assert where.startswith(f"{tmp_path}/activation/") and not where.startswith(coldsnap.__path__[0])
    assert version == files[1] and plugin == "['coldsnap.engines.vllm.plugin:register']"
    trees.verify(tree.sha256)  # who runs it leaves nothing in it


def test_a_fix_is_found_at_the_place_where_the_old_one_was(files, trees, tmp_path):
    old, new = trees.add(files[0]), trees.add(fixed(*files))
    place(tmp_path, ACTIVATION, trees, old.sha256)
    place(tmp_path, ACTIVATION, trees, new.sha256)

    assert found(tmp_path)[1] == f"{files[1]}+fix"
    assert sorted(os.listdir(tmp_path)) == ["activation", "store"]


def test_a_runtime_that_was_changed_is_not_placed(files, trees, tmp_path):
    tree = trees.add(files[0])
    path = tree.path / "coldsnap" / "__init__.py"
    os.chmod(path, 0o644)
    path.write_bytes(b"raise SystemExit\n")
    os.chmod(path, 0o444)

    with pytest.raises(IntegrityError, match=r"tree\.3"):
        place(tmp_path, ACTIVATION, trees, tree.sha256)
    assert not (tmp_path / "activation").exists()


def test_other_paths_of_the_user_stay_behind_it():
    env = activation_environment({"PYTHONPATH": "/a:/b", "X": "1"}, "/run")

    assert env["PYTHONPATH"] == "/run/activation:/a:/b" and env["X"] == "1"
    assert activation_environment(env, "/run") == env
