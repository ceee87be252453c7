"""The process that owns one engine, outlives its caller, and undoes what a dead caller left half done.

Three processes' worth of code lives here, and the one rule keeps them apart: what the guard and the keeper import is
standard library only, so that they start in milliseconds and hold no memory worth mentioning. ``client``, ``handle``,
``rundir`` and ``directive``, which import attrs, are for the caller and the ranks.
"""
