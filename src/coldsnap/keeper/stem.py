"""The root of an engine's tree: a process that does nothing but wait for the engine, and end as it ends.

CRIU fills the memory of a tree's root last and alone, when all other processes are there, and the memory of all others
side by side. So the root had better be small: an engine's own first process has about a gigabyte.

This file is also the program: its text is an argument of the interpreter (:func:`wrapped`), so that a restored process
needs no file of this library.

The one rule: whoever signals the root, or asks how it ended, sees no difference to the engine itself.
"""

import os
import signal
import sys

__all__ = ["wrapped"]

FORWARDED = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGWINCH),
)


def wrapped(argv: tuple[str, ...], *, python: str) -> tuple[str, ...]:
    """Return the command that starts a command below this root.

    Args:
        argv: The command; its first item is a path.
        python: Interpreter of the root, 3.11 or newer.
    """
    import inspect  # noqa: PLC0415  the program itself must stay small

    text = inspect.getsource(sys.modules[__name__])
    # Isolated and without site: no package of the engine is imported, a few megabytes stay.
    return (python, "-I", "-S", "-c", text, *argv)


def main(argv: list[str]) -> None:
    """Start the command, hand signals on, and end as it ends."""
    # Blocked from here on, and taken one by one: none can be lost between fork and exec.
    signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGCHLD})
    engine = os.fork()
    if engine == 0:
        become(argv)
    while True:
        number = signal.sigwaitinfo({*FORWARDED, signal.SIGCHLD}).si_signo
        if number != signal.SIGCHLD:
            os.kill(engine, number)  # not reaped yet, so that the pid is still the engine's
        elif os.waitid(os.P_PID, engine, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            end_as(os.waitstatus_to_exitcode(os.waitpid(engine, 0)[1]))


def become(argv: list[str]) -> None:
    """Be the command: a session of its own, and the signals as this process was given them."""
    os.setsid()
    # An interpreter changes some of them for itself, and whoever started this one may have ignored others.
    for number in (*FORWARDED, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        os.execv(argv[0], argv)  # noqa: S606 - there is no shell, on purpose
    except OSError as error:
        os.write(2, f"cannot start {argv[0]}: {error.strerror}\n".encode())
    os._exit(127)


def end_as(code: int) -> None:
    """End with an exit status, or by the signal of which it is the negative number."""
    if code < 0:
        import resource  # noqa: PLC0415  only now

        # The engine has left its core file, this process has nothing to tell.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    with open("/proc/self/comm", "w") as comm:
        comm.write("coldsnap-stem")
    main(sys.argv[1:])
