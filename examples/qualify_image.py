"""How process images should be stored here: uncompressed, without zero pages, or in LZ4 blocks; size and restore time.

    python examples/qualify_image.py [--python ENGINE_PYTHON] [--criu CRIU] [--engine vllm|reference] [--json FILE]

One engine is started and captured once for each way of storing its pages while it serves on; then every artifact is
restored by every way of feeding CRIU, with its files in the page cache and out of it, in turns, and each restore must
answer the recorded question with the same tokens. Only files of this run are dropped from the page cache.

What leaving out zero pages can gain is their share, which the table has: an image of which a fiftieth is zeros restores
a fiftieth faster without them. ``--engine reference --zero-bytes N`` makes one with as many as wanted.

``--json`` writes: ``machine``, ``load`` (before and after), ``engine``, ``captures`` (``way``, ``raw_bytes``,
``zero_bytes``, ``stored_bytes``, ``seconds``, ``without_packs``: bytes of the artifact, ``composition``:
``composing.py``), ``restores`` (``way``, ``pages``, ``workers``, ``cache``, and lists, one item a restore: ``image_s``:
from the first byte until CRIU is done, ``answer_s``: to the first correct token), ``table``, ``profile`` and
``chosen``: what ``io.image_compression = "auto"`` would come to by these figures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from attrs import asdict, evolve

import coldsnap as cs
import composing  # type: ignore[import-not-found]  # beside this script
import quickstart  # type: ignore[import-not-found]
from coldsnap.drivers.image_profile import Measured, choose
from coldsnap.plan import Plan
from coldsnap.testing.reference import ReferenceEngine

Cache = Literal["hot", "cold"]
Edit = Mapping[str, Any]

STORED: Mapping[str, Edit] = {
    "raw": {"compression": "none", "zero_pages": "keep"},
    "zero-free": {"compression": "none", "zero_pages": "drop"},
    "lz4": {"compression": "lz4", "zero_pages": "drop"},
}


class Way(NamedTuple):
    """How pages are stored, and how they reach CRIU."""

    stored: str
    pages: str
    workers: int

    def __str__(self) -> str:
        """Return it as a row's name."""
        return self.stored if self.pages == "stored" else f"{self.stored} {self.pages}, {self.workers} workers"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; return 0 when every restore answered as before."""
    options = arguments(argv)
    try:
        with quickstart.workspace(options.work) as work:
            result = measure(engine_of(work, options), work, options)
    except cs.ColdSnapError as error:
        print(f"\nthe qualification failed: {error}", file=sys.stderr)
        return 1
    load = " to ".join(f"{each:.1f}" for each in result["load"])
    print(f"\n{result['machine']}, load {load}")
    print("\n".join(["", *result["table"], "", f"chosen by these figures: {result['chosen']}"]))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    return 0


def engine_of(work: Path, options: argparse.Namespace) -> Any:
    """Describe the engine to measure with."""
    if options.model:
        env = dict(item.split("=", 1) for item in options.env)
        return cs.VLLM(options.model, args=tuple(options.engine_args), python=options.python, env=env)
    if options.engine == "vllm":
        return quickstart.tiny_vllm(work, options)
    args = ("--zero-bytes", str(options.zero_bytes))
    return ReferenceEngine(python=options.python, weights_bytes=64 << 20, args=args)


def policy(facts: cs.Facts) -> cs.Policy:
    """Return the policy of every capture and restore; on a GPU, one worker on a driver that this machine has proven."""
    return cs.Policy().evolve(**({"compatibility.driver": "probed"} if facts.host("local").gpus else {}))


def probed(work: Path, options: argparse.Namespace) -> cs.Facts:
    """Return the facts of this machine, with the store of weights that leave the image."""
    return cs.probe(criu=options.criu, store=work / "store")


def measure(engine: Any, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Capture every way, restore every way; return the figures."""
    load = [os.getloadavg()[0]]
    captures = capture_all(engine, work, options)
    ways = [Way("raw", "stored", 1), Way("zero-free", "stored", 1)]
    ways += [Way("lz4", pages, workers) for pages in ("rebuilt", "stream") for workers in options.workers]
    rows: list[dict[str, Any]] = [
        {**way._asdict(), "way": str(way), "cache": cache, "image_s": [], "answer_s": []}
        for cache in ("hot", "cold")
        for way in ways
    ]
    for number in range(options.repeats):
        print(f"round {number + 1} of {options.repeats}", flush=True)
        for row in rows:  # in turns, so that what else the machine does falls on all of them
            image_s, answer_s = restore(work, row, options)
            row["image_s"].append(image_s)
            row["answer_s"].append(answer_s)
    profile = profile_of(captures, rows)
    return {
        "machine": quickstart.machine(),
        "load": [*load, os.getloadavg()[0]],
        "engine": engine.kind,
        "captures": captures,
        "restores": rows,
        "table": table(captures, rows),
        "profile": [asdict(each) for each in profile],
        "chosen": choose(profile).compression,
    }


def capture_all(engine: Any, work: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Start the engine once, and capture it once for each way of storing its pages."""
    found = []
    where = quickstart.place(options)
    if probed(work, options).host("local").gpus:
        cs.qualify_host(criu=options.criu)
    facts = probed(work, options)
    started = cs.execute(cs.resolve(policy(facts), cs.Launch(engine, placement=where), facts))
    with started.serving as launched:
        running = launched
        for name, edit in STORED.items():
            operation = cs.Capture(running, output=work / name, then="keep", prompt=quickstart.PROMPT)
            facts = probed(work, options)
            plan = edited(cs.resolve(policy(facts), operation, facts), "shrink", edit)
            report = cs.execute(plan)
            details = next(receipt for receipt in report.receipts if receipt.step == "shrink").details
            sizes = {key: int(details[key]) for key in ("raw_bytes", "zero_bytes", "stored_bytes")}
            artifact = composing.composition(cs.Artifact.open(work / name))
            sizes["without_packs"] = artifact["without_packs"]
            found.append({"way": name, **sizes, "seconds": details["shrink_s"], "composition": artifact})
            print("\n".join([f"captured {name}", *composing.lines(artifact)]), flush=True)
            running = report.serving
    return found


def edited(plan: Plan, step: str, edit: Edit) -> Plan:
    """Return a plan in which one step has other fields: ways that a policy does not offer are measured too."""
    return evolve(plan, steps=tuple(evolve(each, **edit) if each.id == step else each for each in plan.steps))


def restore(work: Path, row: Mapping[str, Any], options: argparse.Namespace) -> tuple[float, float]:
    """Restore once; return the seconds that the image took, and those to the first correct token."""
    artifact = work / row["stored"]
    operation = cs.Restore(cs.Artifact.open(artifact), placement=quickstart.place(options))
    facts = probed(work, options)
    plan = cs.resolve(policy(facts), operation, facts)
    plan = edited(plan, "stage", {"pages": row["pages"], "workers": row["workers"]})
    with page_cache(artifact, row["cache"]):
        report = cs.execute(plan)
    report.serving.stop(grace_s=0)
    assert report.answer_s is not None  # noqa: S101 - a restore that succeeded has compared an answer
    return report.timeline.between("stage") + report.timeline.between("thaw"), report.answer_s


@contextmanager
def page_cache(artifact: Path, cache: str) -> Iterator[None]:
    """Have the files of an artifact in the page cache, or not; those of others stay as they are."""
    for path in artifact.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                if cache == "cold":
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                else:
                    while file.read(1 << 22):
                        pass
    yield


def median(row: Mapping[str, Any]) -> float:
    """Return the median of the seconds that the image took."""
    return float(statistics.median(row["image_s"]))


def table(captures: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the figures as lines of a Markdown table: medians, and ratios to the raw image in the same cache."""
    sizes = {each["way"]: each for each in captures}
    raw = {row["cache"]: median(row) for row in rows if row["stored"] == "raw"}
    lines = ["| way | MB | of raw | zeros | hot s | of raw | cold s | of raw | hot, cold to first token s |"]
    lines.append("| --- |" + " --- |" * 8)
    for hot in (row for row in rows if row["cache"] == "hot"):
        cold = next(row for row in rows if row["way"] == hot["way"] and row["cache"] == "cold")
        size = sizes[hot["stored"]]
        cells = [hot["way"], f"{size['stored_bytes'] / 1e6:,.1f}", f"{size['stored_bytes'] / size['raw_bytes']:.2f}"]
        cells.append(f"{size['zero_bytes'] / size['raw_bytes']:.2f}")
        for row in (hot, cold):
            cells += [f"{median(row):.2f}", f"{median(row) / raw[row['cache']]:.2f}"]
        cells.append(", ".join(f"{statistics.median(row['answer_s']):.2f}" for row in (hot, cold)))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def profile_of(captures: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> tuple[Measured, ...]:
    """Return what ``drivers/image_profile.py`` holds: each way that the library can take."""
    sizes = {each["way"]: each["stored_bytes"] / each["raw_bytes"] for each in captures}
    cold = {row["way"]: median(row) for row in rows if row["cache"] == "cold"}
    return tuple(
        Measured(
            compression="lz4" if row["stored"] == "lz4" else "none",
            pages=row["pages"],
            workers=row["workers"],
            size_ratio=sizes[row["stored"]],
            hot_s=median(row),
            cold_s=cold[row["way"]],
        )
        for row in rows
        if row["cache"] == "hot" and row["stored"] != "raw"
    )


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the engine and this library")
    parser.add_argument("--criu", help="CRIU 4.2 or newer; looked for when not given")
    parser.add_argument("--engine", choices=("vllm", "reference"), default="vllm")
    parser.add_argument("--zero-bytes", type=int, default=0, help="of the reference engine: memory filled with zeros")
    parser.add_argument("--port", type=int, default=18000)
    parser.add_argument("--work", help="directory to keep model, caches and artifacts in; it must hold no artifacts")
    parser.add_argument("--model", help="directory of a model for vLLM; without it a tiny one is made")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="environment of that vLLM")
    parser.add_argument("--repeats", type=int, default=3, help="restores of each kind")
    parser.add_argument("--workers", type=lambda text: [int(one) for one in text.split(",")], default=[1, 4, 16])
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("engine_args", nargs="*", metavar="-- VLLM_ARGUMENT", help="arguments of that vLLM")
    options = parser.parse_args(argv)
    if options.repeats < 1 or 1 not in options.workers:
        parser.error("the profile needs one restore of each kind, and one worker among --workers")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
