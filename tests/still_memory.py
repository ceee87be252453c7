"""The memory of processes that stand still, page by page: what a restore must bring back.

Every page counts that a process has to itself: what it wrote, anywhere. Pages that it only reads from a file are the
file's; a page of zeros in memory without a file is the same as none.
"""

import hashlib
import os
from array import array

from coldsnap.drivers.dump import await_stopped

# The kernel writes the number of the processor into a registered rseq area whenever a thread comes back from it.
STILL = {"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}
PAGE = 4096
WINDOW = 256
PRESENT, SWAPPED, OF_A_FILE = 1 << 63, 1 << 62, 1 << 61  # Documentation/admin-guide/mm/pagemap.rst


def private_memory(keeper):
    """Return a digest of every page that a process of a tree has to itself, by pid and address."""
    found = {}
    await_stopped(keeper)
    for process in keeper.tree():
        with (
            _opened(keeper, process.pid, "maps") as maps,
            _opened(keeper, process.pid, "pagemap") as pagemap,
            _opened(keeper, process.pid, "mem") as memory,
        ):
            for line in maps.readall().decode().splitlines():
                bounds, mode, _, _, inode, *_ = line.split(maxsplit=5)
                start, end = (int(address, 16) for address in bounds.split("-"))
                if mode[0] == "r" and mode[3] == "p":
                    for first, pages in _own_pages(pagemap, start, end):
                        found |= _digests(memory, process.pid, first, pages, anonymous=inode == "0")
    return found


def _opened(keeper, pid, name):
    return open(os.open(f"{pid}/{name}", os.O_RDONLY, dir_fd=keeper.proc_fd), "rb", buffering=0)


def _own_pages(pagemap, start, end):
    """Yield runs of pages that are the process's own: the first one's address, and how many."""
    pagemap.seek(start // PAGE * 8)
    entries = array("Q", pagemap.read((end - start) // PAGE * 8))
    first = None
    for number, entry in enumerate(entries):
        own = entry & (PRESENT | SWAPPED) and not entry & OF_A_FILE
        if own and first is None:
            first = number
        if first is not None and (not own or number - first == WINDOW):
            yield start + first * PAGE, number - first
            first = number if own else None
    if first is not None:
        yield start + first * PAGE, len(entries) - first


def _digests(memory, pid, first, pages, *, anonymous):
    zero, found = bytes(PAGE), {}
    memory.seek(first)
    data = memory.read(pages * PAGE)
    assert len(data) == pages * PAGE
    for at in range(0, len(data), PAGE):
        page = data[at : at + PAGE]
        if not anonymous or page != zero:
            found[pid, first + at] = hashlib.blake2b(page, digest_size=8).digest()
    return found
