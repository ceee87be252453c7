"""Packs in a Hugging Face repository: publish them once, stage them by digest.

The one rule: content decides. A pack that the repository already has is not sent again, a path that holds other bytes
is an error, and what was fetched counts only after its digest was computed here.

The hub's client brings authentication, redirects and retries; it is imported on first use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import frozen

from coldsnap.artifact.admission import Admission
from coldsnap.artifact.canonical import hex_of
from coldsnap.artifact.payloads import PayloadObject
from coldsnap.artifact.store import Store
from coldsnap.errors import ArtifactError, IntegrityError, PayloadMissingError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

__all__ = ["Hub", "Published"]

_T = TypeVar("_T")


@frozen(kw_only=True)
class Published:
    """The receipt of :meth:`Hub.publish`.

    Attributes:
        repository: ``owner/name``.
        revision: The 40-hex commit that holds every pack; what ``weights.native.revision`` wants.
        uploaded: Digests that were sent.
        present: Digests that were there.
        bytes: How many bytes were sent, at most.
    """

    repository: str
    revision: str
    uploaded: tuple[str, ...]
    present: tuple[str, ...]
    bytes: int


@frozen(kw_only=True)
class Hub:
    """A repository of packs.

    Attributes:
        repository: ``owner/name``.
        endpoint: Address of the hub; None: the client's own.
        token: None: what the client finds.
    """

    repository: str
    endpoint: str | None = None
    token: str | None = None

    def publish(self, objects: Iterable[PayloadObject], store: Store, *, create: bool = False) -> Published:
        """Publish packs that are in a store; each digest is sent at most once, ever.

        Args:
            objects: Of an artifact; several workers may own one pack.
            store: Where the packs are. They are admitted before anything is sent.
            create: Make the repository, private, when it does not exist.

        Raises:
            PayloadMissingError: A pack is not in the store.
            IntegrityError: A pack is damaged, or the repository holds other bytes under its name.
            ArtifactError: The hub refused.
        """
        owners = {item.sha256: item for item in objects}
        for item in owners.values():
            store.admit(item)
        if create:
            self._ask(
                "create the repository", lambda api: api.create_repo(self.repository, private=True, exist_ok=True)
            )
        there = self._present(owners.values(), None)
        missing = [item for item in owners.values() if item.sha256 not in there]
        revision = self._commit(missing, store) if missing else self._head()
        absent = owners.keys() - self._present(owners.values(), revision)
        if absent:
            raise ArtifactError(
                f"{self.repository} does not show {', '.join(sorted(absent))} at {revision}; publish again"
            )
        return Published(
            repository=self.repository,
            revision=revision,
            uploaded=tuple(sorted(item.sha256 for item in missing)),
            present=tuple(sorted(there)),
            bytes=sum(item.bytes for item in missing),
        )

    def _commit(self, missing: list[PayloadObject], store: Store) -> str:
        from huggingface_hub import CommitOperationAdd  # noqa: PLC0415

        additions = [
            CommitOperationAdd(path_in_repo=item.path, path_or_fileobj=str(store.path(item.sha256))) for item in missing
        ]
        message = f"Add {len(missing)} model payload{'s' * (len(missing) != 1)}"
        made = self._ask(
            "upload", lambda api: api.create_commit(self.repository, operations=additions, commit_message=message)
        )
        return self._commit_id(made.oid)

    def _head(self) -> str:
        return self._commit_id(self._ask("resolve the revision", lambda api: api.model_info(self.repository)).sha)

    def _commit_id(self, revision: str | None) -> str:
        if revision is None or not re.fullmatch(r"[0-9a-f]{40}", revision):
            raise ArtifactError(f"{self.repository} answered {revision!r} where a 40-hex commit was expected")
        return revision

    def _present(self, objects: Iterable[PayloadObject], revision: str | None) -> set[str]:
        """Return the digests that the repository holds under their names, and refuse other bytes there."""
        wanted = {item.path: item for item in objects}
        found = self._ask(
            "list the packs", lambda api: api.get_paths_info(self.repository, list(wanted), revision=revision)
        )
        present = set()
        for file in found:
            item, lfs = wanted[file.path], getattr(file, "lfs", None)
            actual = f"sha256:{lfs.sha256}, {lfs.size} bytes" if lfs is not None else "a directory, or a small file"
            if actual != f"{item.sha256}, {item.bytes} bytes":
                raise IntegrityError(
                    "the repository holds other bytes under this name",
                    path=f"{self.repository}/{file.path}",
                    expected=f"{item.sha256}, {item.bytes} bytes",
                    actual=actual,
                )
            present.add(item.sha256)
        return present

    def _ask(self, what: str, question: Callable[[HfApi], _T]) -> _T:
        from huggingface_hub import HfApi  # noqa: PLC0415

        try:
            return question(HfApi(endpoint=self.endpoint, token=self.token))
        except Exception as error:  # the client's HTTP library, and so its exceptions, differ between its versions
            raise ArtifactError(f"{self.repository} cannot {what}: {_said(error)}") from error

    def stage(
        self, item: PayloadObject, store: Store, revision: str, *, files_by_worker: Mapping[str, str] | None = None
    ) -> Admission:
        """Bring one worker's pack into the store; a download that was interrupted goes on where it ended.

        Args:
            item: Which, from the descriptor.
            store: Into which.
            revision: The 40-hex commit to read.
            files_by_worker: Where the packs are in the repository when not under their own paths.

        Raises:
            PayloadMissingError: The repository does not have it.
            IntegrityError: What it has is not the pack.
            ArtifactError: The hub refused, or the connection broke; what arrived is kept for the next attempt.
        """
        name = (files_by_worker or {}).get(item.worker, item.path)

        def fetch(staging: Path) -> Path:
            return self._fetch(name, item, revision, staging)

        return store.stage(item, fetch)

    def _fetch(self, name: str, item: PayloadObject, revision: str, staging: Path) -> Path:
        from huggingface_hub import get_hf_file_metadata, hf_hub_url  # noqa: PLC0415
        from huggingface_hub.errors import EntryNotFoundError  # noqa: PLC0415

        where = f"{self.repository}@{revision}/{name}"
        try:
            url = hf_hub_url(self.repository, name, revision=revision, endpoint=self.endpoint)
            metadata = get_hf_file_metadata(url, token=self.token, endpoint=self.endpoint)
            self._require_announced(metadata, item, where)
            return self._download(url, item, staging)
        except ArtifactError:
            raise
        except EntryNotFoundError as error:
            raise PayloadMissingError(f"{where} does not exist", digest=item.sha256) from error
        except Exception as error:  # as in _ask
            raise ArtifactError(f"{where} cannot be fetched ({_said(error)}); run again to go on") from error

    def _require_announced(self, metadata: Any, item: PayloadObject, where: str) -> None:
        # The hub tells size and, for large files, SHA-256 beforehand: gigabytes of the wrong file need not be fetched.
        told = metadata.etag or ""
        wrong = re.fullmatch(r"[0-9a-f]{64}", told) and told != hex_of(item.sha256)
        if wrong or metadata.size not in {None, item.bytes}:
            raise IntegrityError(
                "the repository holds other bytes under this name",
                path=where,
                expected=f"{item.sha256}, {item.bytes} bytes",
                actual=f"{told}, {metadata.size} bytes",
            )

    def _download(self, url: str, item: PayloadObject, staging: Path) -> Path:
        # hf_hub_download begins anew when its process was killed; its own http_get goes on where a file ends.
        from huggingface_hub.file_download import http_get  # noqa: PLC0415
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # noqa: PLC0415

        path = staging / "download"
        path.touch(mode=0o600)
        with path.open("r+b") as stream:
            there = stream.seek(0, 2)
            if there > item.bytes:
                there = stream.seek(0)
                stream.truncate()
            http_get(
                url,
                stream,
                resume_size=there,
                headers=build_hf_headers(token=self.token),
                expected_size=item.bytes,
                displayed_filename=f"{hex_of(item.sha256)[:12]}.pack",
            )
        return path


def _said(error: BaseException) -> str:
    """Say the first line of an error and of what caused it: the client wraps the reason of a failed upload."""
    said = [str(error).partition("\n")[0] or type(error).__name__]
    while error.__cause__ is not None:
        error = error.__cause__
        said.append(str(error).partition("\n")[0] or type(error).__name__)
    return ": ".join(dict.fromkeys(said))
