"""An artifact as an OCI artifact: a layout directory, or a registry through the ``oras`` client.

The one rule: each file is a blob under the digest that the descriptor lists, and nothing that arrives counts before
it was hashed (rules oci.1 to oci.5, ``docs/format/oci.md``). Packs stay outside.

The client is imported on first use; it comes with ``pip install coldsnap[oci]``.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from attrs import field, frozen

from coldsnap.artifact import canonical, record
from coldsnap.artifact import descriptor as documents
from coldsnap.artifact.canonical import Json, hex_of
from coldsnap.artifact.committed import Artifact
from coldsnap.artifact.descriptor import MAX_DESCRIPTOR_BYTES, Descriptor
from coldsnap.artifact.durable import COMMITTED, remove_partials, staged_file, write_file_durably
from coldsnap.artifact.private import read_small
from coldsnap.artifact.writer import ArtifactWriter
from coldsnap.errors import ArtifactError, FormatError, IntegrityError, UnsupportedError

if TYPE_CHECKING:
    from oras.provider import Registry

__all__ = ["Blob", "Manifest", "export_layout", "import_layout", "manifest_of", "pull", "push"]

MAX_MANIFEST_BYTES = 4 << 20  # what registries accept
CHUNK_BYTES = 64 << 20
_TITLE = "org.opencontainers.image.title"
_PATIENCE_S = 20.0

Fetch = Callable[[str, int, Path], None]


@frozen(kw_only=True)
class Blob:
    """A content descriptor of the OCI image specification, as far as it is used here."""

    mediaType: Literal["application/vnd.coldsnap.descriptor.v9+json", "application/vnd.coldsnap.file"]  # noqa: N815
    digest: str = field(validator=record.sha256)
    size: int = field(validator=record.at_least(1))
    annotations: Mapping[str, str] = field(factory=dict)


@frozen(kw_only=True)
class Manifest:
    """The manifest of one artifact."""

    schemaVersion: Literal[2] = 2  # noqa: N815
    mediaType: Literal["application/vnd.oci.image.manifest.v1+json"] = "application/vnd.oci.image.manifest.v1+json"  # noqa: N815
    artifactType: Literal["application/vnd.coldsnap.artifact.v9"] = "application/vnd.coldsnap.artifact.v9"  # noqa: N815
    config: Blob
    layers: tuple[Blob, ...]
    annotations: Mapping[str, str] = field(factory=dict)

    def encode(self) -> bytes:
        """Return the bytes whose digest names the manifest."""
        return canonical.encode(record.write(self))


def manifest_of(artifact: Artifact) -> Manifest:
    """Return the manifest of an artifact."""
    data = artifact.descriptor.encode()
    return Manifest(
        config=Blob(
            mediaType="application/vnd.coldsnap.descriptor.v9+json", digest=canonical.sha256_of(data), size=len(data)
        ),
        layers=_layers(artifact.descriptor),
        annotations={
            "dev.coldsnap.artifact": artifact.digest,
            "dev.coldsnap.capture_id": artifact.descriptor.capture_id,
        },
    )


def _layers(descriptor: Descriptor) -> tuple[Blob, ...]:
    # An empty file has no blob: some registries refuse one, and the descriptor says all there is to say about it.
    return tuple(
        Blob(
            mediaType="application/vnd.coldsnap.file",
            digest=file.sha256,
            size=file.bytes,
            annotations={_TITLE: file.path},
        )
        for file in sorted(descriptor.files, key=lambda file: file.path)
        if file.bytes
    )


# Layout directories


def export_layout(artifact: Artifact, layout: Path, *, tag: str) -> str:
    """Add an artifact to an OCI layout directory, which is made when it does not exist.

    Args:
        artifact: Verified first.
        layout: The directory.
        tag: Its name in the index; replaces an artifact of that name.

    Returns:
        The digest of the manifest.
    """
    artifact.verify()
    blobs = layout / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    for directory in (layout, blobs):
        remove_partials(directory)  # of exports that were killed
    manifest = manifest_of(artifact)
    for layer in manifest.layers:
        _copy(artifact.path / layer.annotations[_TITLE], blobs / hex_of(layer.digest))
    write_file_durably(blobs / hex_of(manifest.config.digest), artifact.descriptor.encode(), 0o644)
    data = manifest.encode()
    digest = canonical.sha256_of(data)
    write_file_durably(blobs / hex_of(digest), data, 0o644)
    write_file_durably(layout / "oci-layout", canonical.encode({"imageLayoutVersion": "1.0.0"}), 0o644)
    entry = _entry(manifest, digest, len(data), tag)
    others = [one for one in _index(layout) if _name(one) != tag]
    index: Json = {"manifests": [*others, entry], "mediaType": _INDEX_TYPE, "schemaVersion": 2}
    write_file_durably(layout / "index.json", canonical.encode(index), 0o644)
    return digest


_INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
_REFERENCE = "org.opencontainers.image.ref.name"


def _entry(manifest: Manifest, digest: str, size: int, tag: str) -> dict[str, Json]:
    return {
        "annotations": {_REFERENCE: tag},
        "artifactType": manifest.artifactType,
        "digest": digest,
        "mediaType": manifest.mediaType,
        "size": size,
    }


def _copy(source: Path, target: Path) -> None:
    if target.exists():
        return
    with staged_file(target.parent, target.name) as staged:
        shutil.copyfile(source, staged.path)
        staged.publish(target, mode=0o644)


def _index(layout: Path) -> list[dict[str, Any]]:
    # Other tools write index.json too, so that its bytes need not be canonical, nor its fields all known.
    path = layout / "index.json"
    if not path.exists():
        return []
    data = path.read_bytes()
    value = canonical.decode(data, path=str(path), max_bytes=MAX_MANIFEST_BYTES, exact=False)
    manifests = value.get("manifests")
    if not isinstance(manifests, list) or not all(isinstance(one, dict) for one in manifests):
        raise FormatError("the index lists no manifests", path=str(path), rule="oci.1")
    return manifests


def _name(entry: Mapping[str, Any]) -> object:
    annotations = entry.get("annotations")
    return annotations.get(_REFERENCE) if isinstance(annotations, dict) else None


def _digest_of(layout: Path, tag: str) -> str:
    found = [one.get("digest") for one in _index(layout) if _name(one) == tag or one.get("digest") == tag]
    if not found:
        raise ArtifactError(f"{layout} has no artifact {tag!r}")
    digest = found[0]
    # It becomes a path: nothing but hex digits may.
    if not isinstance(digest, str) or not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise FormatError(f"the digest of {tag!r} is not a SHA-256", path=str(layout / "index.json"), rule="oci.1")
    return digest


def import_layout(layout: Path, output: Path, *, tag: str) -> Artifact:
    """Write an artifact from an OCI layout directory.

    Args:
        layout: The directory.
        output: Where the artifact will be.
        tag: Its name in the index, or its manifest's digest.

    Raises:
        ArtifactError: It is not there, breaks a rule, or a blob is damaged; nothing is left at ``output``.
    """
    digest = _digest_of(layout, tag)
    blobs = layout / "blobs" / "sha256"

    def fetch(wanted: str, size: int, target: Path) -> None:
        source = blobs / hex_of(wanted)
        if not source.is_file() or source.stat().st_size != size:
            raise IntegrityError(
                "a blob is missing or cut (rule oci.5)", path=str(source), expected=wanted, actual="not it"
            )
        shutil.copyfile(source, target)

    try:
        data = (blobs / hex_of(digest)).read_bytes()
    except OSError as error:
        raise ArtifactError(f"the manifest {digest} cannot be read: {error.strerror}") from error
    return _write(data, digest, fetch, output)


# Both ways in


def _write(data: bytes, digest: str | None, fetch: Fetch, output: Path) -> Artifact:
    actual = canonical.sha256_of(data)
    if digest not in {None, actual}:
        raise IntegrityError("wrong manifest (rule oci.1)", path="manifest", expected=str(digest), actual=actual)
    value = canonical.decode(data, path="manifest", max_bytes=MAX_MANIFEST_BYTES, exact=False)
    manifest = record.read(Manifest, value, path="manifest")
    with ArtifactWriter.create(output) as writer:
        descriptor = _descriptor(manifest.config, fetch, writer.path / ".descriptor")
        if manifest.layers != _layers(descriptor):
            raise FormatError("the layers are not the files of the descriptor", path="manifest", rule="oci.3")
        for file in descriptor.files:
            target = writer.directory(os.path.dirname(file.path)) / os.path.basename(file.path)
            fetch(file.sha256, file.bytes, target) if file.bytes else target.touch()
            if file.mtime_ns is not None:
                os.utime(target, ns=(file.mtime_ns, file.mtime_ns))
        _seal(writer, descriptor)
        return writer.commit(descriptor)


def _descriptor(config: Blob, fetch: Fetch, scratch: Path) -> Descriptor:
    if config.size > MAX_DESCRIPTOR_BYTES:
        raise FormatError(f"a descriptor of {config.size} bytes", path="manifest at $.config", rule="json.4")
    fetch(config.digest, config.size, scratch)
    scratch.chmod(0o600)
    data = read_small(scratch, max_bytes=MAX_DESCRIPTOR_BYTES)
    scratch.unlink()
    if canonical.sha256_of(data) != config.digest:
        raise IntegrityError(
            "wrong descriptor (rule oci.2)", path=COMMITTED, expected=config.digest, actual=canonical.sha256_of(data)
        )
    return documents.decode(data, path=COMMITTED)[0]


def _seal(writer: ArtifactWriter, descriptor: Descriptor) -> None:
    listed = {file.path: file for file in descriptor.files}
    for directory in sorted({path.partition("/")[0] for path in listed}):
        for made in writer.seal(directory):
            wanted = listed[made.path]
            if (made.sha256, made.bytes) != (wanted.sha256, wanted.bytes):
                raise IntegrityError(
                    "wrong content (rule oci.5)", path=made.path, expected=wanted.sha256, actual=made.sha256
                )


# Registries


def push(artifact: Artifact, reference: str, *, insecure: bool = False, chunk_bytes: int = CHUNK_BYTES) -> str:
    """Push an artifact to a registry; blobs that it has are not sent.

    Args:
        artifact: Verified first.
        reference: ``registry/repository:tag``.
        insecure: Plain HTTP.
        chunk_bytes: Larger blobs go in pieces of this size, bytes.

    Returns:
        ``registry/repository@sha256:<hex>``, which names exactly this artifact.

    Raises:
        UnsupportedError: The client is not installed.
        ArtifactError: The registry cannot be reached, or refused.
    """
    artifact.verify()
    manifest = manifest_of(artifact)
    with _Remote(reference, insecure=insecure) as remote:
        for layer in manifest.layers:
            remote.upload(artifact.path / layer.annotations[_TITLE], layer, chunk_bytes)
        remote.upload(artifact.path / COMMITTED, manifest.config, chunk_bytes)
        return remote.put_manifest(manifest.encode())


def pull(reference: str, output: Path, *, insecure: bool = False) -> Artifact:
    """Pull an artifact from a registry.

    Args:
        reference: ``registry/repository:tag`` or ``registry/repository@sha256:<hex>``.
        output: Where the artifact will be.
        insecure: Plain HTTP.

    Raises:
        UnsupportedError: The client is not installed.
        ArtifactError: The registry cannot be reached, does not have it, or sent something else; nothing is left at
            ``output``.
    """
    with _Remote(reference, insecure=insecure) as remote:
        return _write(remote.get_manifest(), remote.digest, remote.download, output)


class _Remote:
    """One repository of a registry; every failure of the client comes out as an ArtifactError."""

    def __init__(self, reference: str, *, insecure: bool) -> None:
        try:
            from oras.provider import Registry  # noqa: PLC0415
        except ImportError as error:
            raise UnsupportedError(
                "registries need the oras client", field="oci", works="pip install coldsnap[oci], or a layout directory"
            ) from error
        self.reference = reference
        self._registry: Registry = Registry(insecure=insecure)
        self._container = self._registry.get_container(reference)
        self._base = f"{self._registry.prefix}://{self._container.registry}"
        self.digest: str | None = self._container.digest

    def __enter__(self) -> Self:
        # The client waits minutes for a registry that is not there; one request of our own says so at once.
        self._ask("be reached", lambda: self._registry.session.get(f"{self._base}/v2/", timeout=_PATIENCE_S))
        self._registry.auth.load_configs(self._container)
        return self

    def __exit__(self, *_: object) -> None:
        self._registry.session.close()

    def _ask(self, what: str, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except ArtifactError:
            raise
        except Exception as error:  # whatever the client and its HTTP library raise
            raise ArtifactError(f"{self.reference} cannot {what}: {error}") from error

    def upload(self, path: Path, blob: Blob, chunk_bytes: int) -> None:
        layer = {"digest": blob.digest, "size": blob.size, "mediaType": blob.mediaType}
        response = self._ask(
            f"take {path.name}",
            lambda: self._registry.upload_blob(
                str(path), self._container, layer, do_chunked=blob.size > chunk_bytes, chunk_size=chunk_bytes
            ),
        )
        self._require(response, f"take {path.name}")

    def put_manifest(self, data: bytes) -> str:
        self._require(
            self._ask(
                "take the manifest",
                lambda: self._registry.do_request(
                    f"{self._registry.prefix}://{self._container.manifest_url()}",
                    "PUT",
                    data=data,
                    headers={"Content-Type": "application/vnd.oci.image.manifest.v1+json"},
                ),
            ),
            "take the manifest",
        )
        return f"{self._container.registry}/{self._container.api_prefix}@{canonical.sha256_of(data)}"

    def get_manifest(self) -> bytes:
        response = self._ask(
            "be read",
            lambda: self._registry.do_request(
                f"{self._registry.prefix}://{self._container.manifest_url()}",
                headers={"Accept": "application/vnd.oci.image.manifest.v1+json"},
            ),
        )
        self._require(response, "be read")
        return bytes(response.content)

    def download(self, digest: str, size: int, target: Path) -> None:
        self._ask("give a blob", lambda: self._registry.download_blob(self._container, digest, str(target)))
        if target.stat().st_size != size:
            raise IntegrityError(
                "the blob has another size (rule oci.5)",
                path=self.reference,
                expected=f"{digest}, {size} bytes",
                actual=f"{target.stat().st_size} bytes",
            )

    def _require(self, response: Any, what: str) -> None:
        if response.status_code not in {200, 201, 202}:
            raise ArtifactError(f"{self.reference} cannot {what}: {response.status_code} {response.reason}")
