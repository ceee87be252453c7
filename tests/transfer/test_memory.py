"""Memory providers keep their contract: the addresses stay, contents come and go, nothing is done twice."""

import pytest

from coldsnap.transfer.backend import FileExtent
from coldsnap.transfer.hydrate import hydrate
from coldsnap.transfer.memory import HostMemory


class MemoryConformance:
    """What every provider must do; ``provider`` gives a fresh one."""

    SIZE = 3 * (2 << 20) + 123

    def read(self, memory, region, length=None):
        into = memoryview(bytearray(length or region.size_bytes))
        memory.copy_to_host(region.address, into)
        return bytes(into)

    def test_new_memory_is_zero(self, provider):
        assert not any(self.read(provider, provider.allocate(self.SIZE, tag="weights")))

    def test_what_is_copied_in_comes_out(self, provider):
        region = provider.allocate(self.SIZE, tag="weights")
        data = bytes(range(256)) * 100

        provider.copy_from_host(region.address + 77, memoryview(data))
        provider.synchronize()

        assert self.read(provider, region, 77 + len(data)) == bytes(77) + data

    def test_regions_are_found_by_tag_in_order_of_allocation(self, provider):
        first, second, third = (provider.allocate(4096, tag=tag) for tag in ("weights", "kv_cache", "weights"))

        assert provider.regions() == (first, second, third)
        assert provider.regions("weights") == (first, third)
        assert provider.regions("other") == ()
        assert all(region.mapped_bytes >= region.size_bytes == 4096 for region in provider.regions())

    def test_regions_do_not_overlap(self, provider):
        regions = sorted((provider.allocate(self.SIZE, tag="t") for _ in range(3)), key=lambda one: one.address)

        assert all(a.address + a.mapped_bytes <= b.address for a, b in zip(regions, regions[1:], strict=False))

    def test_release_and_remap_keep_the_address_and_forget_the_contents(self, provider):
        region, other = provider.allocate(self.SIZE, tag="weights"), provider.allocate(4096, tag="kv_cache")
        provider.copy_from_host(region.address, memoryview(b"x" * self.SIZE))
        provider.copy_from_host(other.address, memoryview(b"y" * 4096))

        provider.release([region])
        assert not provider.is_mapped(region)
        assert provider.is_mapped(other)
        provider.remap([region])

        assert provider.is_mapped(region)
        assert provider.regions() == (region, other)
        assert not any(self.read(provider, region))
        assert self.read(provider, other) == b"y" * 4096

    def test_neither_release_nor_remap_is_done_twice(self, provider):
        region = provider.allocate(self.SIZE, tag="weights")
        provider.release([region])
        provider.release([region])
        provider.remap([region])
        provider.copy_from_host(region.address, memoryview(b"kept"))

        provider.remap(provider.regions())

        assert self.read(provider, region, 4) == b"kept"

    def test_zero_fills_a_stretch_and_nothing_else(self, provider):
        region = provider.allocate(self.SIZE, tag="kv_cache")
        provider.copy_from_host(region.address, memoryview(b"z" * 10_000))

        provider.zero(region.address + 10, 5000)
        provider.synchronize()

        assert self.read(provider, region, 10_000) == b"z" * 10 + bytes(5000) + b"z" * 4990

    def test_many_cycles_leave_the_addresses_where_they_are(self, provider):
        region = provider.allocate(self.SIZE, tag="weights")
        for turn in range(20):
            provider.release([region])
            provider.remap([region])
            provider.copy_from_host(region.address, memoryview(bytes([turn])))
            assert self.read(provider, region, 1) == bytes([turn])

    def test_a_hydrate_into_remapped_memory_arrives(self, provider, library, tmp_path):
        from layouts import content

        data = content(self.SIZE)
        (tmp_path / "pack").write_bytes(data)
        region = provider.allocate(self.SIZE, tag="weights")
        provider.release([region])
        provider.remap([region])

        hydrate(
            tmp_path / "pack",
            [FileExtent(file_offset=0, address=region.address, length=self.SIZE)],
            memory=provider,
            library=library,
        )

        assert self.read(provider, region) == data


class TestHostMemory(MemoryConformance):
    @pytest.fixture
    def provider(self):
        memory = HostMemory()
        yield memory
        memory.close()

    def test_released_memory_goes_back_to_the_system(self, provider):
        region = provider.allocate(64 << 20, tag="weights")
        provider.copy_from_host(region.address, memoryview(bytearray(64 << 20)))
        before = resident_bytes()

        provider.release([region])

        assert before - resident_bytes() > 60 << 20

    def test_released_memory_cannot_be_used_by_mistake(self, provider):
        region = provider.allocate(4096, tag="weights")
        provider.release([region])

        with pytest.raises(ValueError, match="remap it first"):
            provider.copy_from_host(region.address, memoryview(b"x"))
        with pytest.raises(ValueError, match="no region holds"):
            provider.zero(region.address + 4096, 1)


def resident_bytes():
    with open("/proc/self/statm") as stream:
        return int(stream.read().split()[1]) * 4096
