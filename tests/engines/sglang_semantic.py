"""A model with tied weights, a view, a persistent buffer and one that is not; what is written about it."""

import hashlib
import json
import sys
import zlib
from pathlib import Path

import torch

from coldsnap.engines.sglang import semantic


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4)
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        fused = torch.arange(12, dtype=torch.bfloat16)
        self.first = torch.nn.Parameter(fused[:4], requires_grad=False)
        self.second = torch.nn.Parameter(fused[4:].view(2, 4), requires_grad=False)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("cos_sin", torch.ones(64), persistent=False)


root = Path(sys.argv[1])
model = Model()
storages = semantic.describe({"target": model, "draft": Model()})
names = [[ref["name"] for ref in entry["refs"]] for entry in storages]
assert names == [
    ["buffer:scale"],
    ["draft:buffer:scale"],
    ["draft:parameter:embed.weight", "draft:parameter:head.weight"],
    ["draft:parameter:first", "draft:parameter:second"],
    ["parameter:embed.weight", "parameter:head.weight"],
    ["parameter:first", "parameter:second"],
], names
fused = storages[-1]
assert fused["nbytes"] == 24
contents = bytes(model.first.untyped_storage())
assert fused["sha256"] == f"sha256:{hashlib.sha256(contents).hexdigest()}"
assert fused["crc32"] == zlib.crc32(contents)
second = fused["refs"][1]
assert second == {
    "name": "parameter:second",
    "dtype": "bfloat16",
    "shape": [2, 4],
    "stride": [4, 1],
    "storage_offset_bytes": 8,
    "nbytes": 16,
}
blob = {"bytes": 4096, "sha256": "sha256:" + "0" * 64}
generation = {"worker": "worker-0", "manifest_sha256": blob["sha256"], "pack": blob, "residual": blob}
identity = {"model_path": "/models/tiny", "model_revision": "abc"}
path = semantic.write(
    storages, identity=identity, generation=generation, artifact_dir=root / "artifact", process_root=root / "process"
)
manifest = json.loads(path.read_text())
assert manifest["kind"] == "coldsnap-sglang-semantic"
assert path.parent.name == manifest["identity_sha256"].removeprefix("sha256:")
plan = json.loads((root / "process" / "hydration" / "worker-0" / "manifest.json").read_text())
assert plan["kind"] == "coldsnap-sglang-replay-plan"
assert plan["components"][0]["identity_sha256"] == manifest["identity_sha256"]
assert plan["components"][0]["artifact"] == str(path)
print("described")
