"""Plans, one module for each kind of operation; ``resolve`` chooses among them.

The one rule: pure, like ``resolve`` itself.
"""
