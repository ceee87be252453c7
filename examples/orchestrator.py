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
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

import coldsnap as cs
from coldsnap.operation import Operation

# Small enough for a machine without a GPU.
CPU_ARGS = ("--max-model-len", "512", "--max-num-seqs", "4", "--num-gpu-blocks-override", "64", "--enforce-eager")


class Swapper:
    """Keeps at most one engine running, and none is taken away from those who use it.

    Args:
        engines: What there is, by name.
        work: Where the artifacts lie.
        port: Where whichever engine runs answers.
        criu: CRIU's path, or None to have it looked for.
    """

    def __init__(self, engines: Mapping[str, cs.VLLM], work: Path, *, port: int, criu: str | None = None) -> None:
        self._engines, self._work, self._port, self._criu = engines, work, port, criu
        self._policy = cs.Policy()
        self._name: str | None = None
        self._engine: cs.Engine | None = None
        self._users = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[cs.Engine]:
        """Hold the engine of that name running for a block; bring it back first if it does not run.

        Raises:
            ColdSnapError: It could neither be restored nor started.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._name == name or not self._users)
            if self._name != name or self._engine is None:
                await _in_thread(lambda: self._swap(name))
            engine, self._users = self._engine, self._users + 1
        assert engine is not None  # noqa: S101 - _swap leaves one or raises
        try:
            yield engine
        finally:
            async with self._changed:
                self._users -= 1
                self._changed.notify_all()

    async def stop(self) -> None:
        """Wait until nobody uses the engine that runs, and stop it."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._users)
            await _in_thread(self._stop)

    def _swap(self, name: str) -> None:
        self._stop()
        begin = time.monotonic()
        how, self._engine = self._bring(name)
        self._name = name
        print(f"{name}: {how} in {time.monotonic() - begin:.2f} s", flush=True)

    def _stop(self) -> None:
        engine, self._engine, self._name = self._engine, None, None
        if engine is not None:
            engine.stop()

    def _bring(self, name: str) -> tuple[str, cs.Engine]:
        spec, output, place = self._engines[name], self._work / name, cs.local(port=self._port)
        if not output.exists():
            return "cold start and capture", self._run(cs.Capture(spec, output=output, placement=place, then="keep"))
        try:
            return "restored", self._run(cs.Restore(cs.Artifact.open(output), placement=place))
        except cs.ColdSnapError as error:
            # Whatever the reason, nothing of the attempt is left: the port is free, and the engine can be started.
            print(f"{name}: not restored, starting it instead: {error}", file=sys.stderr, flush=True)
        return "cold start", self._run(cs.Launch(spec, placement=place))

    def _run(self, operation: Operation) -> cs.Engine:
        return cs.execute(cs.resolve(self._policy, operation, cs.probe(criu=self._criu))).serving


async def _in_thread(function: Callable[[], None]) -> None:
    """Run what blocks in a thread, and to its end.

    Whoever waits here may be cancelled, but a thread cannot: what it does must not be lost.
    """
    running = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


async def ask(engine: cs.Engine, model: str, prompt: str) -> str:
    """Ask an engine through its own API."""
    # A connection that is kept alive would be open to the outside when the engine is dumped.
    async with httpx.AsyncClient(timeout=120, headers={"Connection": "close"}) as client:
        body = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0}
        response = await client.post(f"{engine.endpoint.url}/v1/completions", json=body)
        response.raise_for_status()
        return str(response.json()["choices"][0]["text"])


async def serve(swapper: Swapper, engines: Mapping[str, cs.VLLM], *, rounds: int, prompt: str) -> list[str]:
    """Ask every engine in turn, several rounds; return the answers."""
    answers = []
    try:
        for number in range(rounds):
            for name, spec in engines.items():
                async with swapper.use(name) as engine:
                    answers.append(await ask(engine, spec.served_model, prompt))
                print(f"round {number + 1}, {name}: {answers[-1]!r}", flush=True)
    finally:
        await swapper.stop()
    return answers


def main() -> int:
    """Describe two vLLM servers as the command line says, and swap them."""
    options = arguments()
    args, env = (CPU_ARGS, {"VLLM_CPU_KVCACHE_SPACE": "1"}) if options.cpu else ((), {})
    models = {"a": options.model_a, "b": options.model_b}
    engines = {name: cs.VLLM(model, args=args, env=env, python=options.python) for name, model in models.items()}
    with tempfile.TemporaryDirectory(prefix="coldsnap-swap-") as temporary:
        swapper = Swapper(engines, Path(options.work or temporary), port=options.port, criu=options.criu)
        try:
            asyncio.run(serve(swapper, engines, rounds=options.rounds, prompt="You may copy and distribute"))
        except cs.ColdSnapError as error:
            print(f"neither restored nor started: {error}", file=sys.stderr)
            return 1
    return 0


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_a")
    parser.add_argument("model_b")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has vLLM and this library")
    parser.add_argument("--criu", help="CRIU 4.2 or newer; looked for when not given")
    parser.add_argument("--port", type=int, default=18100)
    parser.add_argument("--work", help="directory for the artifacts; a temporary one when not given")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="small settings for a machine without a GPU")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
