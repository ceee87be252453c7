"""Execute a notebook from top to bottom in a fresh kernel, and say what each cell took.

    python examples/run_notebook.py NOTEBOOK [--output EXECUTED] [--timeout SECONDS]
    python examples/run_notebook.py NOTEBOOK --strip

The notebook itself is never written with outputs: they belong to one machine. ``--output`` keeps the executed copy,
also when a cell failed; ``--strip`` removes outputs from the notebook, as it is kept in version control.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from traitlets.config import Config

WIDTH = 160  # of a line of output in the terminal


def main(argv: Sequence[str] | None = None) -> int:
    """Execute or strip."""
    options = arguments(argv)
    notebook = nbformat.read(options.notebook, as_version=4)
    if options.strip:
        nbformat.write(stripped(notebook), options.notebook)
        return 0
    try:
        execute(notebook, options.notebook.parent, timeout_s=options.timeout)
    except (CellExecutionError, CellTimeoutError) as error:
        print(f"{options.notebook}: {error}", file=sys.stderr)
        return 1
    finally:
        if options.output:
            nbformat.write(notebook, options.output)
    return 0


def execute(notebook: Any, directory: Path, *, timeout_s: int) -> None:
    """Run every cell in a kernel of this interpreter, with ``directory`` as its working directory.

    Raises:
        CellExecutionError: A cell raised; its traceback is in the message.
        CellTimeoutError: A cell took longer than ``timeout_s``.
    """
    begun = time.monotonic()

    def executed(cell: Any, cell_index: int, execute_reply: Any) -> None:  # noqa: ARG001 - nbclient's names
        if cell.cell_type == "code":
            print(f"[{time.monotonic() - begun:7.2f} s] {cell.source.splitlines()[0]}", flush=True)
            for line in "".join(text(output) for output in cell.outputs).splitlines():
                print(line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…", flush=True)

    resources = {"metadata": {"path": str(directory)}}
    with tempfile.TemporaryDirectory(prefix="coldsnap-kernel-") as sockets:
        # Unix sockets: the protocol of kernels is not encrypted, and everybody on a machine can connect to a TCP port.
        config = Config(KernelManager={"transport": "ipc", "ip": f"{sockets}/kernel"})
        client = NotebookClient(
            notebook,
            config=config,
            kernel_name="python3",
            timeout=timeout_s,
            resources=resources,
            on_cell_executed=executed,
        )
        client.execute()


def text(output: Any) -> str:
    """Return what a cell showed, as far as a terminal can show it."""
    if output.output_type == "stream":
        return str(output.text)
    shown = output.get("data", {}).get("text/markdown") or output.get("data", {}).get("text/plain", "")
    return f"{shown}\n"


def stripped(notebook: Any) -> Any:
    """Return the notebook without anything that an execution left in it."""
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--output", type=Path, help="where to keep the executed copy")
    parser.add_argument("--timeout", type=int, default=300, help="for each cell, s")
    parser.add_argument("--strip", action="store_true", help="remove outputs from the notebook and do nothing else")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
