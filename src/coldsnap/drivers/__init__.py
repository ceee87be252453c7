"""Drivers freeze and thaw a process tree: CRIU for the processes, the CUDA driver for what lives on the devices.

The one rule: a driver knows processes, files and sockets, and never an engine. Read ``n610`` first.
"""
