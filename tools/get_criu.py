"""Find or make a working CRIU (4.2 or newer) and print its path, last line.

Distributions still ship versions that cannot dump a socket on a current kernel, so on Debian and its relatives this
takes CRIU and its libraries from the suite ``sid`` of the very mirror the machine's own apt uses, through a private
apt root that leaves the system alone, and gives the executable its own loader and libraries. When those packages
cannot be used, it builds the same source package natively. The result lives in a directory named by everything that
decides its contents, under ``~/.cache/coldsnap-ci`` (or ``COLDSNAP_CI_CACHE``), and appears there by one rename.

    python tools/get_criu.py [--dest DIR] [--criu PATH]

Beside the executable lies ``criu.json``: version, digests of executable and libraries, ``build_digest`` over them
(independent of where it is installed), and every package with version and SHA-256.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MINIMUM, SUITE = (4, 2), "sid"
KEYRINGS = tuple(Path("/usr/share/keyrings") / f"debian-archive-keyring.{ending}" for ending in ("gpg", "pgp"))
APT, OS_RELEASE = Path("/etc/apt"), Path("/etc/os-release")
COMMAND_TIMEOUT_S = 900

WAYS = (
    "Ways to have CRIU 4.2 or newer: pass --criu PATH to an executable you trust; install your distribution's package "
    "if it is that new; build it from source (docs/deploy.md#criu)."
)
BUILD_PACKAGES = (
    "build-essential libprotobuf-dev libprotobuf-c-dev protobuf-c-compiler protobuf-compiler python3-protobuf "
    "libcap-dev libnl-3-dev libnl-genl-3-dev libnet1-dev uuid-dev libaio-dev pkg-config libnftables-dev libbsd-dev "
    "libgnutls28-dev"
)


class CriuUnavailableError(Exception):
    """No working CRIU could be found or made; the message says why and what to do."""


@dataclass(frozen=True)
class Mirror:
    """One entry of the machine's apt configuration that serves Debian's own archive."""

    uri: str
    keyring: Path


def deb822_entries(text: str) -> Iterator[dict[str, str]]:
    """Yield each stanza of a ``.sources`` file, field names in lower case (sources.list(5), DEB822 format)."""
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    for stanza in re.split(r"\n\s*\n", "\n".join(lines)):
        fields: dict[str, str] = {}
        name = ""
        for line in stanza.splitlines():
            if line[:1].isspace() and name:
                fields[name] += "\n" + line.strip()
            elif ":" in line:
                name, _, value = line.partition(":")
                name = name.strip().lower()
                fields[name] = value.strip()
        if fields.get("enabled", "yes").lower() not in {"no", "false", "0", "off", "disable", "without"}:
            yield fields


def list_entries(text: str) -> Iterator[dict[str, str]]:
    """Yield each line of a ``sources.list`` file in the form of :func:`deb822_entries`."""
    for line in text.splitlines():
        match = re.match(r"\s*(deb|deb-src)\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)([^#]*)", line)
        if match:
            kind, options, uri, suite, components = match.groups()
            entry = {"types": kind, "uris": uri, "suites": suite, "components": components.strip()}
            for option in (options or "").split():
                name, _, value = option.partition("=")
                entry[name.lower()] = value
            yield entry


def mirrors(entries: Iterable[dict[str, str]], codename: str, keyrings: Sequence[Path] = KEYRINGS) -> Iterator[Mirror]:
    """Yield what serves Debian's archive among ``entries``, in their order.

    Third-party archives name their suites otherwise (``bookworm-pgdg``, ``nodistro``) or have no component ``main``.
    The archive's whole keyring goes before an entry's own, which may hold the key of one stable release only.
    """
    ours = {"stable", "oldstable", "testing", "unstable", "sid", codename}
    seen: set[str] = set()
    for entry in entries:
        if "main" not in entry.get("components", "").split() or not ours & set(entry.get("suites", "").split()):
            continue
        named = [Path(word) for word in entry.get("signed-by", "").split() if word.startswith("/")]
        keyring = next((path for path in [*keyrings, *named] if path.is_file()), None)
        for uri in entry.get("uris", "").split():
            if keyring is not None and uri not in seen:
                seen.add(uri)
                yield Mirror(uri, keyring)


def configured_mirrors(
    apt: Path = APT, release: Path = OS_RELEASE, keyrings: Sequence[Path] = KEYRINGS
) -> list[Mirror]:
    """Return the Debian mirrors this machine is configured for."""
    entries: list[dict[str, str]] = []
    for path in sorted(apt.glob("sources.list.d/*.sources")):
        entries += deb822_entries(path.read_text())
    for path in [apt / "sources.list", *sorted(apt.glob("sources.list.d/*.list"))]:
        if path.is_file():
            entries += list_entries(path.read_text())
    text = release.read_text() if release.is_file() else ""
    codename = re.search(r'^VERSION_CODENAME="?([\w-]+)', text, re.MULTILINE)
    return list(mirrors(entries, codename[1] if codename else "", keyrings))


def run(command: Sequence[str | Path], *, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Run a command; return its output; raise with its last lines when it fails."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-8:])
        raise CriuUnavailableError(f"`{' '.join(map(str, command))}` ended with status {done.returncode}:\n{tail}")
    return done.stdout


def transport_settings(dump: str) -> str:
    """Return the lines of ``apt-config dump`` that say how this machine reaches its mirror (proxies, certificates)."""
    keep = re.compile(r"Acquire::(https?|ftp|mirror|Retries|ForceIPv[46])\b", re.IGNORECASE)
    return "\n".join(line for line in dump.splitlines() if keep.match(line))


class PrivateApt:
    """An apt whose lists, cache, configuration and installed state lie under one directory.

    The state says that nothing is installed, so that apt itself computes the complete closure of a package.
    """

    def __init__(self, root: Path, mirror: Mirror) -> None:
        for name in ("parts", "preferences", "sources", "lists/partial", "cache/archives/partial"):
            (root / name).mkdir(parents=True)
        (root / "status").touch()
        self.root = root
        self.mirror = mirror
        self.architecture = run(["dpkg", "--print-architecture"]).strip()
        config = root / "apt.conf"
        config.write_text(self._config(transport_settings(run(["apt-config", "dump"]))))
        self.env = {**os.environ, "APT_CONFIG": str(config), "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}

    def _config(self, transport: str) -> str:
        root = self.root
        return (
            f'{transport}\nDir::Etc "{root}"; Dir::Etc::main "no.conf"; Dir::Etc::parts "{root}/parts";\n'
            f'Dir::Etc::sourcelist "{root}/no.list"; Dir::Etc::sourceparts "{root}/sources";\n'
            f'Dir::Etc::preferencesparts "{root}/preferences";\n'
            f'Dir::Etc::netrc "{APT}/auth.conf"; Dir::Etc::netrcparts "{APT}/auth.conf.d";\n'
            f'Dir::State "{root}"; Dir::State::lists "{root}/lists"; Dir::State::status "{root}/status";\n'
            f'Dir::Cache "{root}/cache"; Acquire::Languages "none"; APT::Update::Error-Mode "any";\n'
            # The sandbox user could not enter a private directory.
            f'APT::Sandbox::User "root"; APT::Architecture "{self.architecture}";\n'
            f'APT::Architectures {{ "{self.architecture}"; }};\n'
        )

    def update(self, types: str) -> None:
        """Fetch the lists of binary (``deb``) or source (``deb-src``) packages."""
        (self.root / "sources" / f"{types}.sources").write_text(
            # A mirror that was frozen in time serves a Release file past its date; its signature still holds.
            f"Types: {types}\nURIs: {self.mirror.uri}\nSuites: {SUITE}\nComponents: main\n"
            f"Check-Valid-Until: no\nSigned-By: {self.mirror.keyring}\n"
        )
        self.get("update")

    def get(self, *words: str) -> str:
        """Run ``apt-get``."""
        return run(["apt-get", *words], env=self.env, cwd=self.root)


def unpack(apt: PrivateApt, root: Path) -> dict[str, dict[str, str]]:
    """Download CRIU, the tool that edits its loader path, and every library of both; unpack them under ``root``.

    Returns:
        Per package its version, and the SHA-256 of the archive, which apt verified against the signed index.
    """
    apt.get("install", "-y", "--download-only", "--no-install-recommends", "criu", "patchelf")
    packages = {}
    for archive in sorted((apt.root / "cache" / "archives").glob("*.deb")):
        run(["dpkg-deb", "-x", archive, root])
        name, version = run(["dpkg-deb", "-f", archive, "Package", "Version"]).split("\n")[:2]
        packages[name.split()[-1]] = {"version": version.split()[-1], "sha256": sha256(archive)}
    return packages


def sha256(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def libraries(listing: str) -> dict[str, Path]:
    """Read the loader's ``--list`` output: soname → file, the loader itself included."""
    found = re.findall(r"^\s*(?:(\S+) => )?(/?\S*/\S+) \(0x", listing, re.MULTILINE)
    if missing := re.findall(r"^\s*(\S+) => not found", listing, re.MULTILINE):
        raise CriuUnavailableError(f"the unpacked CRIU lacks {', '.join(missing)}")
    return {Path(name or path).name: Path(path) for name, path in found}


def assemble(root: Path, stage: Path, target: Path) -> dict[str, str]:
    """Put CRIU and its libraries from an unpacked ``root`` into ``stage``, made to run from ``target``.

    An ELF file with its own interpreter and library path costs no wrapper process and is what ``ps`` and
    ``/proc/PID/exe`` show. RPATH rather than RUNPATH: it comes before LD_LIBRARY_PATH and holds for the libraries too.

    Returns:
        The digests of the executable as packaged (the interpreter's path depends on ``target``) and of its libraries.
    """
    (loader,) = {path.resolve() for path in root.glob("usr/lib/*/ld-linux-*.so.*")}
    prefix: list[str | Path] = [loader, "--library-path", loader.parent]
    packaged = next(path for path in (root / "usr/sbin/criu", root / "usr/bin/criu") if path.exists())
    (stage / "lib").mkdir()
    digests = {"": sha256(packaged)}
    for name, path in libraries(run([*prefix, "--list", packaged])).items():
        shutil.copyfile(path, stage / "lib" / name)
        (stage / "lib" / name).chmod(0o755)
        digests[name] = sha256(path)
    shutil.copy(packaged, stage / "criu")
    edit = ["--force-rpath", "--set-rpath", "$ORIGIN/lib", "--set-interpreter", str(target / "lib" / loader.name)]
    run([*prefix, root / "usr/bin/patchelf", *edit, stage / "criu"])
    return digests


def build(apt: PrivateApt, stage: Path) -> dict[str, str]:
    """Compile the sid source package with the machine's own compiler and libraries into ``stage``.

    Returns:
        Digests as :func:`assemble` gives them; the libraries are those of the machine.
    """
    apt.update("deb-src")
    uris = apt.get("source", "--download-only", "--print-uris", f"criu/{SUITE}")
    match = re.search(r"'(\S+)' (criu_(\S+)\.orig\.tar\.\w+) \d+ (SHA256:\w+)", uris)
    if match is None:
        raise CriuUnavailableError(f"the source package of CRIU has no original archive:\n{uris}")
    uri, name, version, checksum = match.groups()
    run(["/usr/lib/apt/apt-helper", "download-file", uri, apt.root / name, checksum], env=apt.env)
    with tarfile.open(apt.root / name) as archive:
        archive.extractall(apt.root, filter="data")
    tree = apt.root / f"criu-{version}"
    try:
        run(["make", f"-j{os.cpu_count() or 1}", "criu"], cwd=tree)
    except (CriuUnavailableError, FileNotFoundError) as error:
        raise CriuUnavailableError(f"a native build failed; it needs: {BUILD_PACKAGES}\n{error}") from error
    shutil.copy(tree / "criu" / "criu", stage / "criu")
    listing = run([stage / "criu", "--version"], env={**os.environ, "LD_TRACE_LOADED_OBJECTS": "1"})
    return {"": sha256(stage / "criu")} | {name: sha256(path) for name, path in libraries(listing).items()}


def version_of(criu: Path) -> tuple[int, ...]:
    """Run ``criu --version``.

    Raises:
        CriuUnavailableError: It does not run, or is older than :data:`MINIMUM`.
    """
    try:
        output = run([criu, "--version"])
    except OSError as error:
        raise CriuUnavailableError(f"{criu} does not run: {error}. {WAYS}") from error
    match = re.search(r"Version: (\d+(?:\.\d+)*)", output)
    version = tuple(int(part) for part in match[1].split(".")) if match else ()
    if version < MINIMUM:
        raise CriuUnavailableError(f"{criu} is version {version or 'unknown'}, 4.2 or newer is needed. {WAYS}")
    return version


def check(criu: Path) -> None:
    """Run ``criu check`` on this kernel with these privileges."""
    try:
        run([criu, "check"])
    except CriuUnavailableError as error:
        advice = "run as root with the capabilities of docs/deploy.md#privileges, outside any seccomp filter"
        raise CriuUnavailableError(f"{criu} is installed, but cannot work here; {advice}.\n{error}") from error


def cache_root() -> Path:
    """Return the directory that holds every cached environment."""
    return Path(os.environ.get("COLDSNAP_CI_CACHE", "~/.cache/coldsnap-ci")).expanduser()


def key() -> str:
    """Return the directory name: a digest of what decides the contents, this file and the architecture."""
    inputs = Path(__file__).read_bytes() + os.uname().machine.encode()
    return f"criu-{hashlib.sha256(inputs).hexdigest()[:16]}"


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """Hold the lock of ``target`` and give a directory beside it, removed unless it was renamed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    stage = target.with_name(f".{target.name}.tmp")
    with open(target.with_name(f".{target.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(stage, ignore_errors=True)
        try:
            yield stage
        finally:
            shutil.rmtree(stage, ignore_errors=True)


def make(mirror: Mirror, stage: Path, target: Path) -> None:
    """Fill ``stage`` with a CRIU that runs from ``target``, and describe it in ``criu.json``."""
    work = stage / "work"
    apt = PrivateApt(work, mirror)
    apt.update("deb")
    packages: dict[str, dict[str, str]] = {}
    try:
        packages = unpack(apt, work / "root")
        digests = assemble(work / "root", stage, target)
        origin = f"packages of {SUITE}"
    except CriuUnavailableError as error:
        print(f"the packages cannot be used, building from source instead: {error}", file=sys.stderr, flush=True)
        shutil.rmtree(stage / "lib", ignore_errors=True)
        digests = build(apt, stage)
        origin = f"native build of the source package of {SUITE}"
    loader: list[str | Path] = [*(stage / "lib").glob("ld-linux-*"), "--library-path", stage / "lib"]
    version = re.findall(r"Version: (\S+)", run([*(loader if packages else ()), stage / "criu", "--version"]))[0]
    identity = {"version": version, "executable": digests.pop(""), "libraries": digests}
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":")).encode()
    record = {
        "version": version,
        "sha256": sha256(stage / "criu"),
        "packaged_sha256": identity["executable"],
        "libraries": digests,
        "build_digest": f"sha256:{hashlib.sha256(canonical).hexdigest()}",
        "origin": origin,
        "packages": packages,
    }
    (stage / "criu.json").write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    shutil.rmtree(work)


def ensure(target: Path) -> Path:
    """Return the executable in ``target``, making it when it is not complete yet."""
    with staging(target) as stage:
        mark = target / ".complete"
        if mark.exists() and mark.read_text().strip() == key():
            return target / "criu"
        if target.exists():
            raise CriuUnavailableError(f"{target} exists and was not made by this version of the tool; remove it")
        found = configured_mirrors()
        if not found or shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
            raise CriuUnavailableError(f"this machine's apt is not configured for a Debian mirror. {WAYS}")
        problems = []
        print(f"making {target} (about 20 MB to fetch, some seconds)", file=sys.stderr, flush=True)
        for mirror in found:
            stage.mkdir()
            try:
                make(mirror, stage, target)
            except (CriuUnavailableError, subprocess.TimeoutExpired) as error:
                problems.append(str(error))
                shutil.rmtree(stage)
                continue
            (stage / ".complete").write_text(key() + "\n")
            stage.rename(target)
            return target / "criu"
        raise CriuUnavailableError("\n".join([*problems, WAYS]))


def main(arguments: Sequence[str]) -> int:
    """Print the path of a working CRIU, or say on standard error why there is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dest", type=Path, help="install here rather than in the cache")
    parser.add_argument("--criu", type=Path, help="use this executable rather than any other, after checking it")
    options = parser.parse_args(arguments)
    try:
        criu = options.criu or ensure((options.dest or cache_root() / key()).absolute())
        version_of(criu)
        check(criu)
    except (CriuUnavailableError, OSError, subprocess.TimeoutExpired) as error:
        print(f"get_criu: {error}", file=sys.stderr)
        return 1
    print(criu)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
