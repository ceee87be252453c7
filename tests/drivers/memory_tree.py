"""Processes with memory of every kind that a page image treats in its own way, run as a script. They only wait.

memory_tree.py FILE READY     FILE: 16 pages without a zero byte, to map; READY: made when all is in place
"""

import ctypes
import mmap
import os
import sys
import time

PAGE = 4096
LIBC = ctypes.CDLL(None)


def anonymous(pages):
    return mmap.mmap(-1, pages * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def fill(memory, pages, content):
    for page in pages:
        memory[page * PAGE : (page + 1) * PAGE] = content(page)


def noise(_page):
    return os.urandom(PAGE)


def text(page):
    return (b"page %06d " % page * 400)[:PAGE]


def zeros(_page):
    return bytes(PAGE)


def main(path, ready):
    kept = {}
    kept["zeros"] = anonymous(512)
    fill(kept["zeros"], range(512), zeros)  # there, and all zeros
    kept["mixed"] = anonymous(512)
    fill(kept["mixed"], range(0, 512, 2), noise)
    fill(kept["mixed"], range(1, 512, 2), zeros)
    kept["text"] = anonymous(2048)
    fill(kept["text"], range(2048), text)
    kept["noise"] = anonymous(512)
    fill(kept["noise"], range(512), noise)
    with open(path, "r+b") as file:
        # Zeros written over a private mapping of a file: without the page the file would show through.
        kept["file"] = mmap.mmap(file.fileno(), 16 * PAGE, flags=mmap.MAP_PRIVATE)
        fill(kept["file"], range(8), zeros)
    kept["shared"] = mmap.mmap(-1, 64 * PAGE, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    fill(kept["shared"], range(0, 64, 3), text)
    fill(kept["shared"], range(1, 64, 3), zeros)
    # After the fork each of the two has zeros where the other has text.
    kept["inherited"] = anonymous(256)
    fill(kept["inherited"], range(0, 256, 2), text)
    fill(kept["inherited"], range(1, 256, 2), zeros)
    child = os.fork()
    if child == 0:
        fill(kept["inherited"], range(0, 128, 2), zeros)
        fill(kept["inherited"], range(1, 128, 2), text)
        open(f"{ready}.child", "w").close()
    else:
        while not os.path.exists(f"{ready}.child"):
            time.sleep(0.01)
        fill(kept["inherited"], range(128, 256, 2), zeros)
        open(ready, "w").close()
    while True:
        time.sleep(1000)


if __name__ == "__main__":
    main(*sys.argv[1:])
