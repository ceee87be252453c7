"""The tool that provides CRIU: what it reads of a machine, and that it lands complete or not at all."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "get_criu.py"
spec = importlib.util.spec_from_file_location("get_criu", TOOL)
get_criu = importlib.util.module_from_spec(spec)
sys.modules["get_criu"] = get_criu
spec.loader.exec_module(get_criu)

SOURCES = """\
Types: deb
# a comment inside
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /keys/stable.gpg

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main

Enabled: no
Types: deb
URIs: http://off.example/debian
Suites: bookworm
Components: main

Types: deb
URIs: http://node.example/
Suites: nodistro
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 mQ
"""
LIST = """\
# deb http://commented.example/debian bookworm main
deb [arch=amd64 signed-by=/keys/list.gpg] http://list.example/debian bookworm main contrib
deb http://third.example/apt bookworm-pgdg main
deb http://flat.example/ ./
deb-src http://mirror.example/debian bookworm main
"""
LISTING = """\
\tlinux-vdso.so.1 (0x00007f1a84799000)
\tlibbsd.so.0 => R/usr/lib/x86_64-linux-gnu/libbsd.so.0 (0x00007f1a845b6000)
\t/lib64/ld-linux-x86-64.so.2 => R/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2 (0x00007f1a8479b000)
"""


def entries():
    return [*get_criu.deb822_entries(SOURCES), *get_criu.list_entries(LIST)]


@pytest.fixture
def keyring(tmp_path):
    path = tmp_path / "archive.gpg"
    path.touch()
    return path


def test_mirrors_are_those_that_serve_the_distributions_own_archive(keyring):
    found = get_criu.mirrors(entries(), "bookworm", [keyring])

    assert [mirror.uri for mirror in found] == ["http://mirror.example/debian", "http://list.example/debian"]


def test_the_archives_whole_keyring_goes_before_an_entrys_own(tmp_path, keyring):
    own = tmp_path / "own.gpg"
    own.touch()
    entry = {"uris": "http://m.example/debian", "suites": "trixie", "components": "main", "signed-by": str(own)}

    assert next(get_criu.mirrors([entry], "trixie", [keyring])).keyring == keyring
    assert next(get_criu.mirrors([entry], "trixie", [tmp_path / "absent"])).keyring == own


def test_a_mirror_without_any_keyring_is_not_used(tmp_path):
    assert list(get_criu.mirrors(entries(), "bookworm", [tmp_path / "absent"])) == []


def test_another_distributions_mirror_is_not_taken_for_debians(keyring):
    ubuntu = "deb http://archive.example/ubuntu noble main universe\n"

    assert list(get_criu.mirrors(get_criu.list_entries(ubuntu), "bookworm", [keyring])) == []


def test_both_formats_are_read_from_a_machines_configuration(tmp_path, keyring):
    apt, release = tmp_path / "apt", tmp_path / "os-release"
    (apt / "sources.list.d").mkdir(parents=True)
    (apt / "sources.list.d" / "debian.sources").write_text(SOURCES)
    (apt / "sources.list").write_text(LIST)
    release.write_text('NAME="Debian"\nVERSION_CODENAME=bookworm\n')

    found = [mirror.uri for mirror in get_criu.configured_mirrors(apt, release, [keyring])]

    assert found == ["http://mirror.example/debian", "http://list.example/debian"]


def test_only_what_says_how_to_reach_a_mirror_is_taken_from_the_machines_apt():
    dump = (
        'Acquire::http::Proxy "http://proxy.example:1";\nAcquire::GzipIndexes "true";\n'
        'APT::Update::Post-Invoke:: "rm -rf /var/cache/apt";\nAcquire::https::CaInfo "/ca.pem";\n'
    )

    kept = get_criu.transport_settings(dump)

    assert kept.splitlines() == ['Acquire::http::Proxy "http://proxy.example:1";', 'Acquire::https::CaInfo "/ca.pem";']


def test_the_loaders_listing_is_read_with_the_loader_itself():
    assert set(get_criu.libraries(LISTING)) == {"libbsd.so.0", "ld-linux-x86-64.so.2"}


def test_a_library_that_is_missing_is_named():
    with pytest.raises(get_criu.CriuUnavailableError, match=r"libnet\.so\.9"):
        get_criu.libraries("\tlibnet.so.9 => not found\n")


@pytest.fixture
def executable(tmp_path):
    def make(text):
        path = tmp_path / "criu"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    return make


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, str(TOOL), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **environment},
        check=False,
    )


def test_an_old_criu_is_refused_with_what_is_needed(executable):
    done = run("--criu", executable("echo Version: 4.1.1"))

    assert done.returncode == 1
    assert "4.2 or newer is needed" in done.stderr
    assert done.stdout == ""


def test_a_criu_whose_check_fails_is_refused_with_its_words(executable):
    done = run("--criu", executable('[ "$1" = check ] && { echo "no kcmp here"; exit 1; }; echo Version: 4.2.1'))

    assert done.returncode == 1
    assert "no kcmp here" in done.stderr
    assert "docs/deploy.md#privileges" in done.stderr


def test_a_good_criu_is_printed_last(executable):
    path = executable("echo Version: 4.2.1")

    assert run("--criu", path).stdout == f"{path}\n"


def test_no_criu_at_all_is_refused(tmp_path):
    done = run("--criu", tmp_path / "none")

    assert done.returncode == 1
    assert "does not run" in done.stderr


@pytest.fixture
def no_mirror(monkeypatch):
    monkeypatch.setattr(get_criu, "configured_mirrors", list)


def test_without_a_mirror_the_ways_are_named_and_nothing_is_left(no_mirror, tmp_path):
    with pytest.raises(get_criu.CriuUnavailableError, match="--criu PATH"):
        get_criu.ensure(tmp_path / "target")

    assert not (tmp_path / "target").exists()
    assert not (tmp_path / ".target.tmp").exists()


def test_a_mirror_that_cannot_be_reached_is_an_error_and_leaves_nothing(monkeypatch, tmp_path, keyring):
    nowhere = get_criu.Mirror(f"file://{tmp_path}/no-mirror", keyring)
    monkeypatch.setattr(get_criu, "configured_mirrors", lambda: [nowhere])

    with pytest.raises(get_criu.CriuUnavailableError, match="apt-get update"):
        get_criu.ensure(tmp_path / "target")

    assert not (tmp_path / "target").exists()
    assert not (tmp_path / ".target.tmp").exists()


def test_a_directory_of_someone_elses_is_never_replaced(no_mirror, tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "precious").touch()

    with pytest.raises(get_criu.CriuUnavailableError, match="remove it"):
        get_criu.ensure(tmp_path / "target")

    assert (tmp_path / "target" / "precious").exists()


def test_what_an_interrupted_run_left_is_removed(monkeypatch, tmp_path, keyring):
    (tmp_path / ".target.tmp" / "work").mkdir(parents=True)

    def make(mirror, stage, target):
        (stage / "criu").write_text("made")

    monkeypatch.setattr(get_criu, "configured_mirrors", lambda: [get_criu.Mirror("http://m.example", keyring)])
    monkeypatch.setattr(get_criu, "make", make)

    assert get_criu.ensure(tmp_path / "target").read_text() == "made"
    assert get_criu.ensure(tmp_path / "target").read_text() == "made"


@pytest.mark.criu
@pytest.mark.slow
def test_a_fresh_install_works_and_is_described(tmp_path):
    done = run("--dest", tmp_path / "criu-here")

    assert done.returncode == 0, done.stderr
    criu = Path(done.stdout.splitlines()[-1])
    record = json.loads(criu.with_name("criu.json").read_text())
    assert record["sha256"] == get_criu.sha256(criu)
    assert {name: get_criu.sha256(criu.parent / "lib" / name) for name in record["libraries"]} == record["libraries"]
    assert all(package["version"] and len(package["sha256"]) == 64 for package in record["packages"].values())
    assert sorted(path.name for path in criu.parent.iterdir()) == [".complete", "criu", "criu.json", "lib"]
