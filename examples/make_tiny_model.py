"""Make a small random Qwen3 model with a tokenizer: the directory of a Hugging Face model, without any download.

    python examples/make_tiny_model.py models/tiny

It needs the standard library only, takes a fraction of a second, and gives the same bytes for the same arguments. The
weights are random, so that the model talks nonsense; but it is a real model to vLLM and SGLang, and its logits are far
from flat, so that greedy decoding has one answer.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import struct
from collections.abc import Iterator
from pathlib import Path

HEAD = 64
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# The tokenizer knows these words and all their beginnings; any other text is spelled out byte by byte.
TEXT = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which
one you were all her she there would their we him been has when who will no more if out so up said what its
about than into them can only other time new some could these two may first then do any like my now over such
our man me even most made after also well did many before must through years where much your way down should
because long each just state those people too mr how little good world make very year still see own work here
get both between life being under three never know same last another while us off might great go come since
against right came take used himself few house use place during high without again home around small however
found mrs part school thought went say general once upon war left every dont does got united number hand
course water until always away public something fact less though far put head think called set almost enough
end took night yet government system better four nothing told eyes city going look asked later point next knew
group business give days cold snap engine memory process answer exactly reply hello capture restore token
"""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_alphabet() -> list[str]:
    """Return the printable characters that stand for the bytes 0 to 255 in byte-level tokenizers."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]


def tokenizer() -> tuple[dict[str, int], list[str]]:
    """Return the vocabulary and the merges of a byte-level BPE tokenizer."""
    alphabet = byte_alphabet()
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *sorted(alphabet)))}
    merges: dict[str, None] = {}
    for word in dict.fromkeys(TEXT.split()):
        text = "".join(alphabet[byte] for byte in f" {word}".encode())
        for length in range(1, len(text)):
            merges[f"{text[:length]} {text[length]}"] = None
            vocabulary.setdefault(text[: length + 1], len(vocabulary))
    return vocabulary, list(merges)


def config(vocabulary_size: int, layers: int, hidden: int) -> dict[str, object]:
    """Return ``config.json``."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocabulary_size,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // HEAD,
        "num_key_value_heads": hidden // HEAD // 2,
        "head_dim": HEAD,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }


def tensors(vocabulary_size: int, layers: int, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and the shape of every tensor, in the order of the files."""
    queries, keys = hidden // HEAD * HEAD, hidden // HEAD // 2 * HEAD
    yield "model.embed_tokens.weight", (vocabulary_size, hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{prefix}.self_attn.q_norm.weight", (HEAD,)
        yield f"{prefix}.self_attn.k_norm.weight", (HEAD,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (2 * hidden, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (2 * hidden, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, 2 * hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary_size, hidden)


def bfloat16(value: float) -> bytes:
    """Return the two bytes of a number as bfloat16, rounded towards zero."""
    return struct.pack("<f", value)[2:]


def normal_table(deviation: float) -> tuple[bytes, bytes]:
    """Return the low and the high bytes of 256 equally likely values of a normal distribution."""
    normal = statistics.NormalDist(0.0, deviation)
    values = [bfloat16(normal.inv_cdf((index + 0.5) / 256)) for index in range(256)]
    return bytes(value[0] for value in values), bytes(value[1] for value in values)


def contents(name: str, size: int, source: random.Random, table: tuple[bytes, bytes]) -> bytes:
    """Return the bytes of one tensor: ones for a norm, else random numbers, two table look-ups for each random byte."""
    if "norm" in name:
        return bfloat16(1.0) * size
    draws = source.randbytes(size)
    result = bytearray(2 * size)
    result[0::2], result[1::2] = draws.translate(table[0]), draws.translate(table[1])
    return bytes(result)


def write_safetensors(path: Path, named: list[tuple[str, tuple[int, ...], bytes]]) -> None:
    """Write one safetensors file: the length of the header, the header, the tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape, data in named:
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in named))


def product(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a shape."""
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def write_weights(directory: Path, shapes: list[tuple[str, tuple[int, ...]]], seed: int, shards: int) -> None:
    """Write the tensors into several files, and the index that says which is where."""
    source, table = random.Random(seed), normal_table(0.08)
    named = [(name, shape, contents(name, product(shape), source, table)) for name, shape in shapes]
    size = -(-len(named) // shards)
    where = {}
    for shard in range(shards):
        part = named[shard * size : (shard + 1) * size]
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        write_safetensors(directory / file, part)
        where.update({name: file for name, _, _ in part})
    total = sum(len(data) for _, _, data in named)
    write_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})


def write_tokenizer(directory: Path, vocabulary: dict[str, int], merges: list[str]) -> None:
    """Write ``tokenizer.json`` and its configuration."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    write_json(
        directory / "tokenizer.json",
        {
            "version": "1.0",
            "added_tokens": [{"id": index, "content": token, **flags} for index, token in enumerate(SPECIAL)],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": byte_level,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
        },
    )
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": SPECIAL[0],
            "pad_token": SPECIAL[0],
            "model_max_length": 2048,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def write_json(path: Path, value: object) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(value, indent=1, ensure_ascii=True) + "\n")


def make_tiny_model(
    directory: str | Path, *, layers: int = 4, hidden: int = 256, seed: int = 1234, shards: int = 2
) -> Path:
    """Write the model.

    Args:
        directory: Made when it does not exist.
        layers: Number of layers.
        hidden: Hidden size, a multiple of 128.
        seed: Of the weights.
        shards: Number of weight files.

    Returns:
        The directory.
    """
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    vocabulary, merges = tokenizer()
    write_tokenizer(target, vocabulary, merges)
    write_json(target / "config.json", config(len(vocabulary), layers, hidden))
    write_json(target / "generation_config.json", {"eos_token_id": 0, "pad_token_id": 0, "do_sample": False})
    write_weights(target, list(tensors(len(vocabulary), layers, hidden)), seed, shards)
    return target


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1234)
    options = parser.parse_args()
    path = make_tiny_model(options.directory, layers=options.layers, hidden=options.hidden, seed=options.seed)
    print(f"{path}: {sum(file.stat().st_size for file in path.iterdir()) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
