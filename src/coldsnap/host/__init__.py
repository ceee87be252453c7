"""What machines are: facts as data, the probes that gather them, and the contracts they are held against.

``facts``, ``contracts`` and ``selection`` are pure; ``probe``, ``qualify``, ``mounts`` and ``doctor`` read the machine.
"""
