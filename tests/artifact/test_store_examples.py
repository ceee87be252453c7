"""The examples about artifacts run, and print what their users look for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import HubServer
from test_store import write_native

import coldsnap
from coldsnap.artifact.store import Store

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: object, code: int = 0) -> str:
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(coldsnap.__file__).parents[1]),
            "HF_HUB_DISABLE_XET": "1",
            "HF_TOKEN": "hf_test",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        },
    )
    assert code == ended.returncode, (ended.stdout, ended.stderr)
    return ended.stdout + ended.stderr


@pytest.fixture(name="places")
def _places(tmp_path: Path):
    store = Store(tmp_path / "store")
    one = write_native(tmp_path / "artifacts" / "one", store)
    two = write_native(tmp_path / "artifacts" / "two", store, seed=1)
    return one, two, store


def test_an_artifact_is_shown_verified_and_compared(places) -> None:
    one, two, store = places

    assert one.digest in run("inspect_artifact.py", "show", one.path)
    verified = run("inspect_artifact.py", "verify", one.path, "--store", store.root)
    assert "no gap, no overlap" in verified
    assert "0 bytes read" in run("inspect_artifact.py", "verify", one.path, "--store", store.root)
    assert "KiB" in run("inspect_artifact.py", "verify", one.path, "--store", store.root, "--full")
    assert "only left" in run("inspect_artifact.py", "diff", one.path, two.path)
    assert "is not an artifact" in run("inspect_artifact.py", "show", store.root, code=1)


def test_garbage_is_told_and_then_collected(places) -> None:
    one, two, store = places
    roots = one.path.parent

    (pack,) = two.packs
    assert pack in run("inspect_artifact.py", "store", store.root)
    deleted = run("inspect_artifact.py", "delete", two.path, "--store", store.root, "--roots", roots)
    assert f"would delete pack {pack}" in deleted
    assert two.path.exists()
    run("inspect_artifact.py", "delete", two.path, "--really")
    told = run("inspect_artifact.py", "collect", store.root, roots, "--grace-s", "0")
    assert f"would remove {pack}" in told
    assert 2 == len(store.packs())
    assert f"removed {pack}" in run("inspect_artifact.py", "collect", store.root, roots, "--grace-s", "0", "--really")
    assert [one.packs] == [frozenset({pack.sha256}) for pack in store.packs()]


def test_packs_are_published_and_the_policy_lines_are_printed(places) -> None:
    one, _, store = places
    with HubServer() as server:
        arguments = (
            "packs",
            one.path,
            "--store",
            store.root,
            "--repository",
            "team/packs",
            "--endpoint",
            server.endpoint,
        )
        first = run("publish.py", *arguments, "--create")
        second = run("publish.py", *arguments)

    assert "1 packs sent" in first
    assert "0 packs sent" in second
    assert f'revision = "{server.commits["team/packs"][-1][0]}"' in second


def test_the_store_is_qualified(tmp_path: Path) -> None:
    run("qualify_store.py", "--bytes", 1 << 22, "--directory", tmp_path, "--json", tmp_path / "figures.json")

    figures = json.loads((tmp_path / "figures.json").read_text())
    assert {"file_digest_ratio", "extent_verify_ratio", "write_ratio", "readmit_ms"} <= figures.keys()
    assert all(figures[key] > 0 for key in ("file_digest_ratio", "extent_verify_ratio", "write_ratio", "readmit_ms"))
    assert ["figures.json"] == [path.name for path in tmp_path.iterdir()]
