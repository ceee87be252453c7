"""Bytes in motion: between files and final addresses, on a GPU or in host memory.

The one rule: a transfer that returns has arrived, was verified and is synchronised; one that raises published nothing.
Nothing here imports torch or an engine; ``native`` and its ``interface`` alone touch ctypes.
"""
