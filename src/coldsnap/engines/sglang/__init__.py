"""SGLang: ``plugin`` and what it imports run inside the ranks.

The one rule: importing this package imports nothing, because every rank does it.
"""
