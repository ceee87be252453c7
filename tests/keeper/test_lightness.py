"""What starts in milliseconds may import nothing heavy."""

import json
import subprocess
import sys
from pathlib import Path

import coldsnap

SOURCES = Path(coldsnap.__file__).parent.parent


def test_guard_and_keeper_import_the_standard_library_only():
    script = (
        f"import sys, json; sys.path.append({str(SOURCES)!r})\n"
        "import coldsnap.keeper.guard\n"
        "names = {name.partition('.')[0] for name in sys.modules}\n"
        "print(json.dumps([sorted(names - sys.stdlib_module_names - {'coldsnap', '__main__'}), sorted(sys.modules)]))\n"
    )
    result = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, check=True)

    others, modules = json.loads(result.stdout)

    assert others == []
    heavy = {"asyncio", "logging", "subprocess", "dataclasses", "inspect", "email", "http", "multiprocessing"}
    assert not heavy & set(modules)
