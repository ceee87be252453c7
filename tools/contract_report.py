"""Hold the contract with an engine against a release, without installing it, and print what is not as expected.

    python tools/contract_report.py vllm-0.26.0-cp38-abi3-manylinux_2_35_x86_64.whl
    python tools/contract_report.py /opt/vllm/lib/python3.12/site-packages/vllm
    python tools/contract_report.py 0.26.0          # pip downloads the wheel (some hundred MB) and it is removed after
    python tools/contract_report.py latest          # the same, the newest release
    python tools/contract_report.py --engine sglang 0.5.23          # some 40 MB

Of a wheel only the sources that the contract names are unpacked; nothing of it is imported. The exit status is 0 when
everything is as expected, 1 when something is not. Needs coldsnap in the interpreter that runs it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from coldsnap.engines.sglang import contract as sglang
from coldsnap.engines.structure import Report
from coldsnap.engines.vllm import contract as vllm

ENGINES = {"vllm": vllm, "sglang": sglang}
# Wheels are for other machines than the one that asks, and their names say so in these ways.
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in (35, 34, 31, 28)), "manylinux1_x86_64")
DOWNLOAD_TIMEOUT_S = 1800


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release", help="a wheel, the directory of an installed engine, a version, or latest")
    parser.add_argument("--engine", choices=sorted(ENGINES), default="", help="default: by the name, else vllm")
    asked = parser.parse_args(arguments)
    engine = asked.engine or ("sglang" if Path(asked.release).name.startswith("sglang") else "vllm")
    with tree_of(asked.release, engine) as (tree, version):
        found = ENGINES[engine].report(tree, version=version)
    sys.stdout.write(shown(found))
    return 1 if found.missing else 0


def shown(found: Report) -> str:
    """Write a report for people: the verdict, then each thing that is not as expected."""
    count = len(found.findings)
    verdict = f"{count - len(found.missing)} of {count} requirements are met"
    lines = [
        f"{found.engine} {found.version or 'of unknown version'}: {verdict}",
        *(f"  {line}" for line in found.missing),
    ]
    return "\n".join(lines) + "\n"


@contextmanager
def tree_of(release: str, engine: str) -> Iterator[tuple[Path, str]]:
    """Give the directory of the package and its version; what was unpacked or downloaded is removed at the end."""
    path = Path(release)
    if path.is_dir():
        yield path, version_beside(path, engine)
        return
    with tempfile.TemporaryDirectory(prefix="contract-") as temporary:
        wheel = path if path.suffix == ".whl" else download(release, Path(temporary) / "wheel", engine)
        yield unpack(wheel, Path(temporary) / "tree", engine), wheel.name.split("-")[1]


def unpack(wheel: Path, into: Path, engine: str) -> Path:
    """Take the sources that the contract names out of a wheel."""
    wanted = {
        "/".join([engine, *requirement.module.split(".")]) + ending
        for one in ENGINES[engine].CONTRACT
        for requirement in (one, one.instead)
        if requirement is not None
        for ending in (".py", "/__init__.py")
    }
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(into, [name for name in archive.namelist() if name in wanted])
    return into / engine


def download(version: str, into: Path, engine: str) -> Path:
    """Have pip download the wheel of a version, or of the newest."""
    if version != "latest" and not re.fullmatch(r"[0-9][0-9A-Za-z.+]*", version):
        raise SystemExit(f"{version!r} is no wheel, no directory, no version and not latest")
    named = engine if version == "latest" else f"{engine}=={version}"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(into)]
    command += ["--implementation", "cp", "--python-version", "3.12"]
    command += ["--abi", "abi3", "--abi", "cp312", "--abi", "none"]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*command, named], check=True, timeout=DOWNLOAD_TIMEOUT_S)
    return next(into.glob("*.whl"))


def version_beside(tree: Path, engine: str) -> str:
    """Return the version that the metadata beside a package tells, empty when there is none."""
    pattern = re.compile(rf"{engine}(?:_cpu)?-([0-9][^-]*)\.dist-info")
    return next((found[1] for path in tree.parent.iterdir() if (found := pattern.fullmatch(path.name))), "")


if __name__ == "__main__":
    raise SystemExit(main())
