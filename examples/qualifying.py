"""What qualifications of engines share: cold starts, a capture and restores of one engine, in one run, bounded in time.

Used by ``qualify_vllm.py``; ``showing.py`` shows the figures. Parts run in the order of what they are worth, each
writes the figures so far, and what the time did not allow, or what failed, is a row that says so: a figure that is
missing is never a figure that is good.

Every time is from the call that asks for it to the first token of an answer, admission included. Keys of the JSON:
``machine``, ``engine``, ``rows`` (name → ``seconds``, one for each repeat, ``note``), ``not_run`` (name → reason),
``split`` (of each hot restore: step → s), ``requests`` (``when``, ``first_s``, ``tenth_s``, ``rate``: of
``measuring.Rate``; before the capture and after each restore), ``sizes`` (bytes by kind), ``receipts`` (of the
capture: step → what was done), ``exact`` (answers compared, and how many were different), ``restored`` (receipts of the
last hot restore), ``second_capture`` (``new_pack_bytes`` of a capture with another KV cache, ``packs`` its bytes in
packs), ``engines_own`` (answers that were compared, and were different, after the engine's own sleep and reload),
``by_hand`` (what the rival printed), ``work`` (``path`` and ``filesystem`` of artifact and store), ``composition``
(``composing.py``), ``rate_ratios`` (tokens/s after each restore to those before the capture), ``still_cached`` (bytes
that a cold restore did not read from the disk, as the page cache kept them), what ``living.py``,
``recovering.py`` and ``ways.py`` add,
``digests`` (``tensors`` that the engine's ranks had before the capture, ``comparisons`` of all of them after a restore,
``different``: when → names), ``speedup`` (slowest hot restore against the fastest warm-cache cold start),
``over_by_hand`` (median hot restore against that of the rival ``by_hand.py``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx

import coldsnap as cs
import ways  # type: ignore[import-not-found]  # beside this script
from choosing import common_arguments, workspace  # type: ignore[import-not-found]  # beside this script
from coldsnap.engines.acceptance import Answer, Question
from coldsnap.engines.base import Engine as Spec
from coldsnap.engines.control import Ranks
from coldsnap.host.mounts import filesystem_of
from coldsnap.plan import Plan
from composing import composition  # type: ignore[import-not-found]
from living import Action, parts  # type: ignore[import-not-found]
from measuring import (  # type: ignore[import-not-found]
    PROMPT,
    NotRun,
    differences,
    evict,
    in_order,
    machine,
    receipts_of,
    steady_rates,
)
from recovering import RECOVERY, recovered  # type: ignore[import-not-found]

PROMPTS = (
    "Reply with exactly: coldsnap",
    "The capital of France is",
    PROMPT,
    "def fibonacci(n):",
    "1 2 3 4 5 6 7",
)
BY_HAND = "restore by hand, sleep level 2 and reload"
DIGEST_TIMEOUT_S = 600.0
ANSWER_TIMEOUT_S = 300.0

Baseline = Callable[[str], float]
"""Takes the URL of a serving engine, lets it sleep and wake its own way, and returns the seconds of the waking."""


__all__ = ["Baseline", "NotRun", "Qualification", "common_arguments", "workspace"]


class Qualification:
    """One engine on this machine, from its first start to its last restore."""

    def __init__(self, spec: Spec, policy: cs.Policy, work: Path, options: argparse.Namespace) -> None:
        self.spec, self.policy, self.work, self.options = spec, policy, work, options
        self.deadline = time.monotonic() + 60 * options.minutes
        self.answers: list[Answer] = []
        self.compared, self.different = 0, 0
        self.digests: Mapping[str, Mapping[str, str]] = {}
        self.result: dict[str, Any] = {
            "machine": machine(),
            "work": {"path": str(work), "filesystem": filesystem_of(work).type},
            "engine": {"kind": spec.kind, "model": spec.model, "args": list(spec.args)},
            "rows": {},
            "not_run": {},
            "split": [],
            "requests": [],
            "rate_ratios": {},
            "digests": {"tensors": 0, "comparisons": 0, "different": {}},
        }

    def run(
        self,
        *,
        baseline: Baseline | None = None,
        baseline_spec: Spec | None = None,
        by_hand: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Run every part; return the figures."""
        self.part("capture", self.capture)
        self.part("restore, hot", lambda: self.restores("restore, hot", self.options.restores))
        if self.options.recovery:
            self.part(RECOVERY, lambda: recovered(self))
        for name, action in ways.parts(self).items():
            self.part(name, action)
        if self.options.clones:
            self.part(f"restore, {self.options.clones} at once", self.clones)
        self.part("cold start, caches warm", lambda: self.warm_start(baseline, baseline_spec or self.spec))
        if by_hand:
            self.part(BY_HAND, lambda: self.by_hand(by_hand))
        self.part("restore, cold", lambda: self.restores("restore, cold", self.options.cold_restores, cold=True))
        self.living()
        self.conclude()
        return self.result

    def part(self, name: str, action: Callable[[], None]) -> None:
        """Run one part if there is time; what it lacks or breaks is a row."""
        print(f"\n== {name}", flush=True)
        try:
            self.require_time()
            action()
        except NotRun as reason:
            self.result["not_run"][name] = str(reason)
        except (cs.ColdSnapError, httpx.HTTPError) as error:
            self.result["not_run"][name] = f"failed: {error}"
            print(f"{name} failed: {error}", file=sys.stderr, flush=True)
        self.save()

    def require_time(self, where: str = "") -> None:
        """Begin nothing that the time does not allow.

        Raises:
            NotRun: It is over.
        """
        if time.monotonic() > self.deadline:
            raise NotRun(f"the {self.options.minutes:g} minutes were over{where}")

    def save(self) -> None:
        """Write the figures so far."""
        self.result["exact"] = {"answers": self.compared, "different": self.different}
        if self.options.json:
            Path(self.options.json).write_text(json.dumps(self.result, indent=1) + "\n")

    def row(self, name: str, seconds: float, note: str = "") -> None:
        """Add one repeat of a figure."""
        row = self.result["rows"].setdefault(name, {"seconds": [], "note": note})
        row["seconds"].append(seconds)
        print(f"  {name}: {seconds:.2f} s", flush=True)

    # -- the parts -----------------------------------------------------------------------------------------------------

    def capture(self) -> None:
        """Start the engine for the first time, ask, capture it, and let it end."""
        with self.launched(self.spec, "cold start, no compile cache", "page cache as it was found") as engine:
            self.answers = self.asked(engine)
            self.requests(engine, "before the capture")
            self.digests = Ranks(engine.keeper.rank_dir).digests(timeout_s=DIGEST_TIMEOUT_S)
            self.result["digests"]["tensors"] = sum(len(found) for found in self.digests.values())
            output = self.work / "artifact"
            report = self.execute(cs.Capture(engine, output=output, answer_tokens=self.options.tokens))
        for step in ("quiesce", "dump", "shrink", "seal", "commit"):
            self.row(f"capture: {step}", report.timeline.between(step))
        self.row("capture, whole", report.timeline.seconds)
        artifact = cs.Artifact.open(output)
        self.result["sizes"] = dict(artifact.size_bytes)
        self.result["composition"] = composition(artifact)
        self.result["receipts"] = receipts_of(report)

    def restores(
        self,
        name: str,
        count: int,
        *,
        cold: bool = False,
        way: str = "",
        artifact: cs.Artifact | None = None,
        policy: cs.Policy | None = None,
    ) -> None:
        """Restore, compare, measure and stop, several times; another way keeps its receipts by its name."""
        artifact = artifact or self.captured()
        for number in range(count):
            self.require_time(f" after {number} of {count}")
            if cold:
                self.make_cold(artifact)
            report = self.execute(cs.Restore(artifact, placement=self.place), policy)
            with report.serving as engine:
                self.row(name, report.answer_s or 0.0)
                if way:
                    self.result.setdefault("ways", {})[way] = receipts_of(report)
                elif not cold:
                    self.result["split"].append({span.name: span.seconds for span in report.timeline.spans})
                    self.result["restored"] = receipts_of(report)
                self.compare(self.asked(engine))
                self.compare_digests(engine, f"{name} {number + 1}")
                if not cold:  # by its first answers an engine is as warm as any
                    self.requests(engine, f"{name} {number + 1}")
            self.save()

    def living(self) -> None:
        """Do to one restored engine what leaves it alive; each is a part, with the engine that the one before left."""
        wanted = parts(self)
        if not wanted:
            return
        held: list[cs.Engine] = []
        self.part("an engine that lives on", lambda: held.append(self.restored()))
        try:
            for name, action in wanted.items():
                self.part(name, partial(self.done_to, held, action))
        finally:
            if held and held[-1].status().state == "running":
                held[-1].stop()

    def done_to(self, held: list[cs.Engine], action: Action) -> None:
        """Do one of them, and hold what it leaves."""
        held.append(action(self, self.held(held)))

    def held(self, engines: Sequence[cs.Engine]) -> cs.Engine:
        """Return the handle that is good.

        Raises:
            NotRun: There is none, or its engine has ended.
        """
        if not engines or engines[-1].status().state != "running":
            raise NotRun("no engine lives")
        return engines[-1]

    def restored(self) -> cs.Engine:
        """Restore, and compare."""
        engine = self.execute(cs.Restore(self.captured(), placement=self.place)).serving
        self.compare(self.asked(engine))
        return engine

    def clones(self) -> None:
        """Restore several at the same moment, each at a port of its own, and ask all of them while all serve."""
        artifact, count = self.captured(), self.options.clones
        name = f"restore, {count} at once"
        places = [cs.local(port=self.options.port + number) for number in range(count)]
        with ExitStack() as serving, ThreadPoolExecutor(count) as pool:
            started = [pool.submit(self.execute, cs.Restore(artifact, placement=place)) for place in places]
            errors = [future.exception() for future in started]
            reports = [future.result() for future, error in zip(started, errors, strict=True) if error is None]
            engines = [serving.enter_context(report.serving) for report in reports]
            for error in filter(None, errors):
                raise error
            for report in reports:
                self.row(name, report.answer_s or 0.0)
            for answers in list(pool.map(self.asked, engines)):
                self.compare(answers)
            for number, engine in enumerate(engines, 1):
                self.compare_digests(engine, f"{name} {number}")

    def captured(self) -> cs.Artifact:
        """Return the artifact.

        Raises:
            NotRun: The capture has failed.
        """
        path = self.work / "artifact"
        if not (path / "artifact.json").exists():
            raise NotRun("there is no artifact")
        return cs.Artifact.open(path)

    def make_cold(self, artifact: cs.Artifact) -> None:
        """Drop what a restore reads from the page cache.

        Raises:
            NotRun: It lies in memory.
        """
        if filesystem_of(artifact.path).kind == "memory":
            raise NotRun(f"{artifact.path} lies in memory, so that nothing of it can be cold")
        packs = list((self.work / "store").rglob("*.pack"))
        kept = evict([*(path for path in artifact.path.rglob("*") if path.is_file()), *packs])
        self.result.setdefault("still_cached", []).append(kept)

    def warm_start(self, baseline: Baseline | None, spec: Spec) -> None:
        """Start the engine again, with everything cached, and let it sleep and wake its own way."""
        for number in range(self.options.cold_starts):
            with self.launched(spec, "cold start, caches warm", "compile cache and page cache warm") as engine:
                self.compare(self.asked(engine))
                if number == 0:
                    self.part_of_start(engine, baseline)
                if number == self.options.cold_starts - 1 and spec.args != self.spec.args:
                    self.part("second capture, another KV cache", lambda: self.second_capture(engine))

    def second_capture(self, engine: cs.Engine) -> None:
        """Capture the same model with another KV cache: its weights are in the store already."""
        output = self.work / "second"
        report = self.execute(cs.Capture(engine, output=output, answer_tokens=self.options.tokens))
        receipts = receipts_of(report)
        self.result["second_capture"] = {
            "new_pack_bytes": receipts.get("release", {}).get("new_pack_bytes"),
            "packs": cs.Artifact.open(output).size_bytes.get("packs", 0),
        }
        self.row("second capture, another KV cache", report.timeline.seconds)

    def part_of_start(self, engine: cs.Engine, baseline: Baseline | None) -> None:
        """Measure the engine's own way of sleeping, as a baseline."""
        name = "baseline: the engine's own sleep and reload"
        if baseline is None:
            self.result["not_run"][name] = "this engine, or this machine, has none"
            return
        different = 0
        for _ in range(self.options.restores):
            seconds = baseline(engine.endpoint.url)
            answer = self.ask(engine, PROMPTS[0])
            self.row(name, seconds + answer.first_token_s, "waking only: the process never ended")
            different += bool(self.answers) and answer != self.answers[0]
        self.result["engines_own"] = {"answers": self.options.restores, "different": different}

    def by_hand(self, command: Sequence[str]) -> None:
        """Run the rival that restores by hand."""
        output = self.work / "by_hand.json"
        done = subprocess.run([*command, "--json", str(output)], capture_output=True, text=True, check=False)
        if not output.exists():
            raise NotRun(f"the rival failed: {(done.stderr or done.stdout)[-600:]}")
        told = self.result["by_hand"] = json.loads(output.read_text())
        for seconds in told["restore_s"]:
            self.row(BY_HAND, seconds, f"answers different: {told['different']} of {len(told['restore_s'])}")

    def conclude(self) -> None:
        """Set the figures against each other."""
        rows = self.result["rows"]
        hot = rows.get("restore, hot", {}).get("seconds")
        warm = rows.get("cold start, caches warm", {}).get("seconds")
        base = rows.get(BY_HAND, {}).get("seconds")
        self.result["speedup"] = min(warm) / max(hot) if warm and hot else None
        self.result["over_by_hand"] = statistics.median(base) / statistics.median(hot) if base and hot else None
        self.save()

    # -- what they are made of -----------------------------------------------------------------------------------------

    @property
    def place(self) -> cs.Placement:
        """Return where every engine is placed."""
        return cs.local(port=self.options.port)

    def planned(self, operation: Any, policy: cs.Policy | None = None) -> Plan:
        """Resolve with fresh facts."""
        return cs.resolve(policy or self.policy, operation, cs.probe(criu=self.options.criu, store=self.work / "store"))

    def execute(self, operation: Any, policy: cs.Policy | None = None) -> cs.Report:
        """Resolve with fresh facts, and run."""
        return cs.execute(self.planned(operation, policy), on_event=cs.progress(file=sys.stdout))

    @contextmanager
    def launched(self, spec: Spec, name: str, note: str) -> Iterator[cs.Engine]:
        """Launch, measure to the first token, and stop in the end, if it still runs."""
        begin = time.monotonic()
        report = self.execute(cs.Launch(spec, placement=self.place, ready_timeout_s=self.options.ready_timeout_s))
        engine = report.serving
        try:
            elapsed = time.monotonic() - begin
            self.row(name, elapsed + self.ask(engine, PROMPTS[0]).first_token_s, note)
            yield engine
        finally:
            if engine.status().state == "running":
                engine.stop()

    def ask(self, engine: cs.Engine, prompt: str, tokens: int | None = None) -> Answer:
        """Ask greedily, as an acceptance does."""
        question = Question(prompt=prompt, max_tokens=tokens or self.options.tokens)
        return self.spec.ask(engine.endpoint, question, timeout_s=ANSWER_TIMEOUT_S)

    def asked(self, engine: cs.Engine) -> list[Answer]:
        """Ask every prompt, each on an emptied prefix cache: a cached one takes another path through the kernels."""
        answers = []
        for prompt in PROMPTS:
            Ranks(engine.keeper.rank_dir).reset_prefix_cache()
            answers.append(self.ask(engine, prompt))
        return answers

    def compare(self, answers: Sequence[Answer], prompts: Sequence[str] = PROMPTS) -> None:
        """Hold answers against those before the capture."""
        if not self.answers:
            raise NotRun("nothing was captured, so that there is nothing to compare with")
        for prompt, found, expected in zip(prompts, answers, self.answers, strict=False):
            self.compared += 1
            if found != expected:
                self.different += 1
                told = f"{list(found.token_ids)} instead of {list(expected.token_ids)}"
                print(f"  DIFFERENT after {prompt!r}: {told}", file=sys.stderr, flush=True)

    def compare_digests(self, engine: cs.Engine, when: str) -> None:
        """Hold every parameter and buffer of every rank against what it was before the capture."""
        if not self.digests:
            return  # no rank has a model that can be looked at: ``tensors`` says so
        found = Ranks(engine.keeper.rank_dir).digests(timeout_s=DIGEST_TIMEOUT_S)
        different = differences(in_order(self.digests), in_order(found))
        self.result["digests"]["comparisons"] += 1
        if different:
            self.result["digests"]["different"][when] = different
            print(f"  DIFFERENT tensors: {', '.join(different[:5])}, {len(different)} in all", file=sys.stderr)

    def requests(self, engine: cs.Engine, when: str) -> None:
        """Measure the first and the tenth request from now, and steady tokens/s."""
        options = self.options
        seconds = [self.ask(engine, f"{PROMPTS[1]} {number}", 16).seconds for number in range(10)]
        url, model = engine.endpoint.url, self.spec.served_model
        rounds = {"rounds": options.rate_rounds, "warm_up": options.rate_warm_up}
        (rate,) = steady_rates([url], model, options.steady_tokens, **rounds)
        done = self.result["requests"]
        done.append({"when": when, "first_s": seconds[0], "tenth_s": seconds[9], "rate": rate.told()})
        if len(done) > 1:
            self.result["rate_ratios"][when] = rate.median / done[0]["rate"]["tokens_per_s"]
