"""The checkpoint of the reference engine."""

from coldsnap.testing.checkpoint import write_checkpoint
from coldsnap.transfer.safetensors import index


def test_the_same_seed_gives_the_same_file_and_another_seed_another(tmp_path):
    first, again, other = (
        write_checkpoint(tmp_path / name, seed=seed, size_bytes=100_000).read_bytes()
        for name, seed in (("first", 7), ("again", 7), ("other", 8))
    )

    assert first == again != other


def test_it_is_safetensors_of_the_size_that_was_asked_for(tmp_path):
    stored = index([write_checkpoint(tmp_path / "model.safetensors", size_bytes=1 << 20)])

    assert set(stored) == {"ballast", "embedding", "output", "recurrent"}
    assert abs(sum(one.length for one in stored.values()) - (1 << 20)) < 64
