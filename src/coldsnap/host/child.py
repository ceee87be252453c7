"""Run a module of this package in a process of its own.

The one rule: what may leave traces in a process (a CUDA context) or take it down happens in a child with a deadline.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from coldsnap.errors import ColdSnapError

# The child finds this very package, wherever the caller imported it from; -P keeps the working directory out.
BOOT = (
    "import runpy, sys; root = sys.argv.pop(1); root in sys.path or sys.path.insert(0, root); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


class ChildError(ColdSnapError):
    """A probe's child failed or did not end in time."""


def command(module: str, *arguments: str) -> list[str]:
    """Return the argument vector that runs a module of this package."""
    root = Path(__file__).resolve().parents[2]
    return [sys.executable, "-P", "-c", BOOT, str(root), module, *arguments]


def output(arguments: list[str], *, timeout_s: float, env: dict[str, str] | None = None) -> str:
    """Run a command to its end; return its standard output.

    Args:
        arguments: The command.
        timeout_s: Deadline; the child is killed then.
        env: Its environment, the caller's when ``None``.

    Raises:
        ChildError: It does not start, fails, or takes too long; the message has its last lines.
    """
    try:
        done = subprocess.run(
            arguments,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            env=env,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ChildError(f"{arguments[0]} did not end within {timeout_s:g} s") from error
    except OSError as error:
        raise ChildError(f"{arguments[0]} does not start: {error.strerror}") from error
    if done.returncode:
        said = (done.stdout + done.stderr).decode(errors="replace")
        raise ChildError(last_lines(said) or f"{arguments[0]} ended with status {done.returncode}")
    return done.stdout.decode(errors="replace")


def last_lines(text: str, count: int = 3) -> str:
    """Return the last lines that say something, in one line."""
    # CRIU complains on every machine without CAP_SYS_RESOURCE, and on every one whose /run is no tmpfs; both are noise.
    noise = ("Can't setup RLIMIT_NOFILE", "Can't keep kdat cache")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not any(word in line for word in noise)]
    return "; ".join(lines[-count:])
