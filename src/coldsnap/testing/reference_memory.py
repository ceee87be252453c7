"""The reference engine's model in memory that can be released: weights of a checkpoint, and a KV cache that is used.

The one rule: an answer depends on every byte of the weights' memory, on the prompt and, through the KV cache, on every
token before; a byte that did not come back, or a cache entry that refers to what is gone, changes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from safetensors import safe_open

from coldsnap.artifact.extents import Allocation
from coldsnap.engines.ordered import ordered
from coldsnap.engines.rank import Operation
from coldsnap.engines.weights.digests import digests_of, ends_of
from coldsnap.engines.weights.load_record import LoadRecord
from coldsnap.engines.weights.observe import LoadObserver
from coldsnap.engines.weights.split import Split, split
from coldsnap.engines.weights.worker import WorkerMemory
from coldsnap.errors import ContractError
from coldsnap.testing.checkpoint import HIDDEN
from coldsnap.transfer.memory import HostMemory
from coldsnap.transfer.safetensors import index, read_header

__all__ = ["ReleasableModel"]

_ALIGNMENT = 256
_GAIN = 2.5
_FOLD_BYTES = 1 << 20
_TYPES = {"I8": torch.int8}
_ROW_BYTES = 4 * HIDDEN


class ReleasableModel(torch.nn.Module):  # type: ignore[misc]  # torch is not there where types are checked
    """A recurrent model; every state it goes through is a row of its KV cache.

    Args:
        path: The checkpoint.
        kv_bytes: Size of the KV cache.
        scale: What the weights are multiplied with; not in the checkpoint.
        noise: Give a greedy request another answer each time.
        hoard: Keep a second copy of the weights, where no release reaches it.
    """

    def __init__(
        self, path: str, kv_bytes: int, *, scale: float = 1 / 64, noise: bool = False, hoard: bool = False
    ) -> None:
        super().__init__()
        self.memory = HostMemory()
        self.noise = noise
        stored = {one.name: one for one in read_header(path, whole=False)}
        names = sorted(stored)
        sizes = [-(-stored[name].length // _ALIGNMENT) * _ALIGNMENT for name in names]
        self._weights = self.memory.allocate(sum(sizes) + _ROW_BYTES, tag="weights")
        self._kv = self.memory.allocate(max(kv_bytes, 64 * _ROW_BYTES), tag="kv_cache")
        self._all = torch.frombuffer(self.memory.buffer(self._weights), dtype=torch.uint8)
        self._rows = torch.frombuffer(self.memory.buffer(self._kv), dtype=torch.float32).view(-1, HIDDEN)
        at = 0
        for name, size in zip(names, sizes, strict=True):
            part = self._all[at : at + stored[name].length].view(_TYPES[stored[name].dtype]).view(stored[name].shape)
            self.register_parameter(name, torch.nn.Parameter(part, requires_grad=False))
            at += size
        scales = self._all[at : at + _ROW_BYTES].view(torch.float32)
        self.register_buffer("scales", scales)
        self._record: LoadRecord | None = None
        self._load(path)
        scales.copy_(torch.linspace(0.9, 1.1, HIDDEN) * scale)
        self._copy = self._all.clone() if hoard else None
        self._cached: dict[str, int] = {}
        self._next = 0

    def _load(self, path: str) -> None:
        directive = ordered.directive
        if directive is not None and directive.fills:
            ordered.start(self, directive)
            return
        if directive is not None and directive.checkpoint is not None:
            path = directive.checkpoint.path
        stored, parameters = index([path]), dict(self.named_parameters())
        with LoadObserver(self) as observer, safe_open(path, framework="pt") as file:
            tensors = ((name, file.get_tensor(name)) for name in sorted(stored))
            for name, tensor in observer.bound(tensors, stored):
                parameters[name].copy_(tensor)
        self._record = observer.record
        ordered.loaded(self, observer.record)

    def operations(self) -> Mapping[str, Operation]:
        """Return what the worker's rank answers about its memory."""
        worker = WorkerMemory(self.memory, split=self._split, ends=lambda size: ends_of(self, size))
        return {**worker.operations(), "digests": digests_of(lambda: self)}

    def _split(self) -> Split:
        if self._record is None:
            raise ContractError("nothing of a load was seen in an engine that was started from a pack")
        settled = self._record.settle(self)
        regions = self.memory.regions("weights")
        allocations = [Allocation(address=one.address, size=one.size_bytes, region=one.tag) for one in regions]
        return split(allocations, settled.written, settled.kept, copies=settled.copies, derived=settled.derived)

    def generate(self, prompt: str, max_tokens: int, temperature: float, *, cached: bool) -> Iterator[int]:
        """Continue a prompt, byte by byte.

        Args:
            prompt: What to continue.
            max_tokens: How many tokens.
            temperature: 0: greedy.
            cached: The front end's prefix cache has the prompt: its last state is taken from the KV cache.
        """
        row = self._cached.get(prompt) if cached else None
        if row is None:
            row = self._write(self._folded())
            for token in prompt.encode():
                row = self._write(self._advance(self._rows[row], token))
            self._cached[prompt] = row
        for _ in range(max_tokens):
            logits = (self.output.float() * self.scales) @ self._rows[row]
            if self.noise:
                logits = logits + 100 * torch.randn_like(logits)
            if temperature > 0:
                token = int(torch.multinomial(torch.softmax(logits / temperature, 0), 1))
            else:
                token = int(logits.argmax())
            yield token
            row = self._write(self._advance(self._rows[row], token))

    def _write(self, state: torch.Tensor) -> int:
        if self._next == len(self._rows):
            self._next = 0
            self._cached.clear()  # the rows that it refers to are written anew
        row, self._next = self._next, self._next + 1
        self._rows[row] = state
        return row

    def _advance(self, state: torch.Tensor, token: int) -> torch.Tensor:
        ballast = self.ballast[(token * 7919) % len(self.ballast)].float() * self.scales
        # A gain above one keeps the state wandering, so that an answer does not settle on one token.
        recurrent = _GAIN * (self.recurrent.float() * self.scales) @ state / HIDDEN**0.5
        return torch.tanh(recurrent + self.embedding[token].float() * self.scales + ballast)

    def _folded(self) -> torch.Tensor:
        """Return a state in which every byte of the weights' memory has a share."""
        total = 0
        words = self._all[: len(self._all) // 8 * 8].view(torch.int64)
        for chunk in words.split(_FOLD_BYTES // 8):
            odd = torch.arange(3, 2 * len(chunk) + 3, 2)
            total = (31 * total + int((chunk * odd).sum())) & 0xFFFFFFFFFFFFFFFF
        return torch.tensor([1.0 if total >> bit & 1 else -1.0 for bit in range(HIDDEN)])
