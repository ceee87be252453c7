"""Hold the contract with vLLM against a release, without installing it, and print what is not as expected.

    python tools/contract_report.py vllm-0.26.0-cp38-abi3-manylinux_2_35_x86_64.whl
    python tools/contract_report.py /opt/vllm/lib/python3.12/site-packages/vllm
    python tools/contract_report.py 0.26.0          # pip downloads the wheel (some hundred MB) and it is removed after
    python tools/contract_report.py latest          # the same, the newest release

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

from coldsnap.engines.vllm.contract import CONTRACT, Report, report

PACKAGE = "vllm"
# Wheels are for other machines than the one that asks, and their names say so in these ways.
PLATFORMS = ("manylinux_2_35_x86_64", "manylinux_2_31_x86_64", "manylinux_2_28_x86_64", "manylinux1_x86_64")
DOWNLOAD_TIMEOUT_S = 1800


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release", help="a wheel, the directory of an installed vllm, a version, or latest")
    with tree_of(parser.parse_args(arguments).release) as (tree, version):
        found = report(tree, version=version)
    sys.stdout.write(shown(found))
    return 1 if found.missing else 0


def shown(found: Report) -> str:
    """Write a report for people: the verdict, then each thing that is not as expected."""
    count = len(found.findings)
    verdict = f"{count - len(found.missing)} of {count} requirements are met"
    lines = [f"vLLM {found.version or 'of unknown version'}: {verdict}", *(f"  {line}" for line in found.missing)]
    return "\n".join(lines) + "\n"


@contextmanager
def tree_of(release: str) -> Iterator[tuple[Path, str]]:
    """Give the directory of the package and its version; what was unpacked or downloaded is removed at the end."""
    path = Path(release)
    if path.is_dir():
        yield path, version_beside(path)
        return
    with tempfile.TemporaryDirectory(prefix="contract-") as temporary:
        wheel = path if path.suffix == ".whl" else download(release, Path(temporary) / "wheel")
        yield unpack(wheel, Path(temporary) / "tree"), wheel.name.split("-")[1]


def unpack(wheel: Path, into: Path) -> Path:
    """Take the sources that the contract names out of a wheel."""
    wanted = {
        "/".join([PACKAGE, *requirement.module.split(".")]) + ending
        for requirement in CONTRACT
        for ending in (".py", "/__init__.py")
    }
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(into, [name for name in archive.namelist() if name in wanted])
    return into / PACKAGE


def download(version: str, into: Path) -> Path:
    """Have pip download the wheel of a version, or of the newest."""
    if version != "latest" and not re.fullmatch(r"[0-9][0-9A-Za-z.+]*", version):
        raise SystemExit(f"{version!r} is no wheel, no directory, no version and not latest")
    named = PACKAGE if version == "latest" else f"{PACKAGE}=={version}"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(into)]
    command += ["--implementation", "cp", "--abi", "abi3", "--abi", "cp312", "--python-version", "3.12"]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*command, named], check=True, timeout=DOWNLOAD_TIMEOUT_S)
    return next(into.glob("*.whl"))


def version_beside(tree: Path) -> str:
    """Return the version that the metadata beside a package tells, empty when there is none."""
    pattern = re.compile(r"vllm(_cpu)?-([0-9][^-]*)\.dist-info")
    return next((found[2] for path in tree.parent.iterdir() if (found := pattern.fullmatch(path.name))), "")


if __name__ == "__main__":
    raise SystemExit(main())
