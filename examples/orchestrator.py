"""One machine, two engines, room for one: swap them by capture and restore, with asyncio.

    python examples/orchestrator.py MODEL_A MODEL_B [--python ENGINE_PYTHON] [--work DIR] [--rounds 2]

The first time an engine is asked for it is started and captured; from then on it is restored in place of the other.
A restore that is refused (another driver, a changed file) falls back to a cold start, and says why.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

import httpx

import coldsnap as cs

ENGINE_ARGS = ("--max-model-len", "512", "--max-num-seqs", "4", "--num-gpu-blocks-override", "64", "--enforce-eager")


class Swapper:
    """Keeps at most one engine running.

    Blocking calls run in threads: ``execute`` may take minutes, and an event loop must stay responsive meanwhile.
    """

    def __init__(self, engines: dict[str, cs.VLLM], work: Path, *, port: int, criu: str | None) -> None:
        self._engines, self._work, self._port, self._criu = engines, work, port, criu
        self._policy = cs.Policy()
        self._running: tuple[str, cs.Engine] | None = None
        self._lock = asyncio.Lock()

    async def engine(self, name: str) -> cs.Engine:
        """Return the running engine of that name, bringing it back first if the other one runs."""
        async with self._lock:
            if self._running and self._running[0] == name:
                return self._running[1]
            await self.stop()
            begin = time.monotonic()
            how, engine = await asyncio.to_thread(self._bring, name)
            print(f"{name}: {how} in {time.monotonic() - begin:.2f} s", flush=True)
            self._running = (name, engine)
            return engine

    async def stop(self) -> None:
        """Stop what runs."""
        if self._running:
            _, engine = self._running
            self._running = None
            await asyncio.to_thread(engine.stop)

    def _bring(self, name: str) -> tuple[str, cs.Engine]:
        output = self._work / name
        if not output.exists():
            report = self._run(
                cs.Capture(self._engines[name], output=output, placement=cs.local(port=self._port), then="keep")
            )
            return "cold start and capture", report.engine
        try:
            artifact = cs.Artifact.open(output)
            return "restored", self._run(cs.Restore(artifact, placement=cs.local(port=self._port))).engine
        except cs.ColdSnapError as error:
            # Whatever the reason, nothing of the attempt is left: the port is free and the engine can be started.
            print(f"{name}: not restored, starting it instead: {error}", file=sys.stderr)
        report = self._run(cs.Launch(self._engines[name], placement=cs.local(port=self._port)))
        return "cold start", report.engine

    def _run(self, operation: object) -> cs.Report:
        return cs.execute(cs.resolve(self._policy, operation, cs.probe(criu=self._criu)))


async def ask(engine: cs.Engine, model: str, prompt: str) -> str:
    """Ask an engine through its own API."""
    async with httpx.AsyncClient(timeout=120, headers={"Connection": "close"}) as client:
        body = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0}
        response = await client.post(f"{engine.endpoint.url}/v1/completions", json=body)
        response.raise_for_status()
        return response.json()["choices"][0]["text"]


async def run(options: argparse.Namespace, work: Path) -> None:
    """Ask both engines in turn."""
    models = {"a": options.model_a, "b": options.model_b}
    env = {"VLLM_CPU_KVCACHE_SPACE": "1"} if options.cpu else {}
    engines = {
        name: cs.VLLM(model, args=ENGINE_ARGS if options.cpu else (), python=options.python, env=env)
        for name, model in models.items()
    }
    swapper = Swapper(engines, work, port=options.port, criu=options.criu)
    try:
        for number in range(options.rounds):
            for name in models:
                engine = await swapper.engine(name)
                text = await ask(engine, engines[name].served_model, "You may copy and distribute")
                print(f"round {number + 1}, {name}: {text!r}", flush=True)
    finally:
        await swapper.stop()


def main() -> int:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_a")
    parser.add_argument("model_b")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--criu")
    parser.add_argument("--port", type=int, default=18100)
    parser.add_argument("--work", help="directory for the artifacts; a temporary one when not given")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="small settings for a machine without a GPU")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="coldsnap-swap-") as temporary:
        asyncio.run(run(options, Path(options.work or temporary)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
