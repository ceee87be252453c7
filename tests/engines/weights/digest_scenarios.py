"""Digests of a torch module, told as JSON; run by an interpreter that has torch."""

import hashlib
import json

import torch
from torch import nn

from coldsnap.engines.weights.digests import digest_of, digests_of, staged


class Model(nn.Module):
    def __init__(self, many=0):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3), requires_grad=False)
        self.tied = self.weight
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.bfloat16), persistent=False)
        for number in range(many):
            self.register_buffer("b" * 40 + f"{number:04}", torch.tensor([number]))


def pages(model):
    digests, found, sizes, first = digests_of(lambda: model), {}, [], 0
    while first is not None:
        page = digests({"op": "digests", "timeout_s": 5, "first": first})
        found |= page["digests"]
        sizes.append(len(json.dumps(page)))
        first = page["next"]
    return {"found": found, "pages": sizes, "tensors": page["tensors"]}


plain = torch.arange(12.0).view(3, 4)
expected = hashlib.sha256(b"torch.float32 (2, 3)\n" + torch.arange(6.0).numpy().tobytes()).hexdigest()
flipped = plain.clone()
flipped.view(torch.uint8)[2, 9] ^= 1
print(
    json.dumps(
        {
            "small": pages(Model()),
            "expected": expected,
            "many": pages(Model(many=2000)),
            "before": digests_of(lambda: None)({}),
            "plain": digest_of(plain),
            "transposed": digest_of(plain.t().contiguous().t()),
            "flipped": digest_of(flipped),
            "reshaped": digest_of(plain.view(4, 3)),
            "retyped": digest_of(plain.view(torch.int32)),
            "meta": digest_of(torch.empty(4, device="meta")),
            "empty": digest_of(torch.empty(0)),
            "staged": [bytes(piece).hex() for piece in staged(torch.arange(10, dtype=torch.uint8), 4)],
            "staged_nothing": list(staged(torch.empty(0, dtype=torch.uint8))),
        }
    )
)
