"""The memory of processes that stand still, page by page: what a restore must bring back."""

import hashlib
import os

NOT_MEMORY = {"[vvar]", "[vvar_vclock]", "[vdso]", "[vsyscall]"}
# The kernel writes the number of the processor into a registered rseq area whenever a thread comes back from it.
STILL = {"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}
PAGE = 4096


def private_memory(keeper):
    """Return a digest of every page of the private mappings of every process of a tree that stands still."""
    found = {}
    for process in keeper.tree():
        assert process.state == "T"
        with _opened(keeper, process.pid, "maps") as maps, _opened(keeper, process.pid, "mem") as memory:
            for line in maps.readall().decode().splitlines():
                bounds, mode, _, _, _, *name = line.split(maxsplit=5)
                start, end = (int(address, 16) for address in bounds.split("-"))
                if mode[0] == "r" and mode[3] == "p" and not set(name) & NOT_MEMORY:
                    found |= _digests(memory, process.pid, start, end)
    return found


def _opened(keeper, pid, name):
    return open(os.open(f"{pid}/{name}", os.O_RDONLY, dir_fd=keeper.proc_fd), "rb", buffering=0)


def _digests(memory, pid, start, end):
    zero = bytes(PAGE)
    found = {}
    for window in range(start, end, 1 << 20):
        memory.seek(window)
        data = memory.read(min(1 << 20, end - window))
        for at in range(0, len(data), PAGE):
            page = data[at : at + PAGE]
            found[pid, window + at] = 0 if page == zero else hashlib.blake2b(page, digest_size=8).digest()
    return found
