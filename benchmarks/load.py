"""Many streaming clients at once against `surefoot serve`, of whom a third go away in the middle.

    python benchmarks/load.py --clients 200 --seconds 300

Checked: no answer is an error, every finished text is that of the same request alone, no slot is left taken, the
server's memory stays flat, and it ends when it is told to. Linux only (memory is read from /proc).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx

from surefoot.cli.bench_server import started

PROMPTS = (
    "def fibonacci(n):\n    ",
    "import os\nimport sys\n\n\ndef main():\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "The old mill stood at the end of the lane, and ",
    "x = [1, 2, 3]\ny = [1, 2, 3]\nz = [1, 2, " * 8,
    "# Grüße, 漢字 und 🙂\ntext = '",
)
FLAT = 1.10  # how much memory may grow between the first third of the time and the end


@dataclass
class Counts:
    finished: int = 0
    left: int = 0
    tokens: int = 0
    faults: list[str] = field(default_factory=list)
    first: list[float] = field(default_factory=list)


def requests() -> list[dict[str, Any]]:
    """Requests of many kinds, all of which have one right answer."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 1, "top_p": 0.9},
        {"temperature": 1.0, "seed": 2, "top_k": 40, "repetition_penalty": 1.2},
        {"temperature": 0, "drafter": "ngram"},
        {"temperature": 0.8, "seed": 3, "drafter": "none"},
        {"temperature": 0, "stop": ["\n\n", "return"]},
    ]
    return [
        {"prompt": prompt, "max_tokens": 16 + 16 * (place % 3), "ignore_eos": True, "stream": True} | kind
        for place, (prompt, kind) in enumerate((prompt, kind) for prompt in PROMPTS for kind in kinds)
    ]


async def ask(client: httpx.AsyncClient, body: dict[str, Any], chunks: int | None, counts: Counts) -> str | None:
    """The text of an answer; None if this client went away after so many chunks."""
    text, begun, seen, ended = "", time.perf_counter(), 0, False
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"status {answer.status_code}: {(await answer.aread()).decode()}")
        if chunks == 0:
            return None
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            seen += 1
            if seen == 1:
                counts.first.append(time.perf_counter() - begun)
            text += event["choices"][0]["text"]
            ended = event["choices"][0]["finish_reason"] is not None
            counts.tokens += len(event["surefoot"])
            if chunks is not None and seen >= chunks and not ended:
                return None
    if not ended:
        raise RuntimeError("the stream ended without a finish reason")
    return text


async def one_client(
    client: httpx.AsyncClient, number: int, until: float, right: list[str], counts: Counts, bodies: list[dict[str, Any]]
) -> None:
    """Ask one thing after another until the time is over."""
    dice = random.Random(number)
    while time.monotonic() < until:
        which = dice.randrange(len(bodies))
        chunks = dice.randrange(6) if number % 3 == 0 else None
        try:
            text = await ask(client, bodies[which], chunks, counts)
        except Exception as error:
            counts.faults.append(f"request {which}: {type(error).__name__}: {error}")
            continue
        if text is None:
            counts.left += 1
        elif text == right[which]:
            counts.finished += 1
        else:
            counts.faults.append(f"request {which}: expected {right[which]!r}, found {text!r}")


async def watch(pid: int, until: float) -> list[int]:
    """The server's resident memory, once a second."""
    sizes = []
    while time.monotonic() < until:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        match = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert match is not None
        sizes.append(int(match[1]) * 1024)
        await asyncio.sleep(1)
    return sizes


async def load(url: str, pid: int, clients: int, seconds: float) -> list[str]:
    """Everything; what was found wrong."""
    bodies, counts = requests(), Counts()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        right = [await ask(client, body, None, Counts()) or "" for body in bodies]
        until = time.monotonic() + seconds
        tasks = [one_client(client, number, until, right, counts, bodies) for number in range(clients)]
        watching = asyncio.ensure_future(watch(pid, until))
        await asyncio.gather(*tasks)
        sizes = await watching
        await asyncio.sleep(1)
        stats = (await client.get("/stats")).json()
    faults = counts.faults
    if stats["running"] or stats["queued"]:
        faults.append(f"slots: expected all free, found {stats}")
    third = max(1, len(sizes) // 3)
    early, late = statistics.median(sizes[third : 2 * third] or sizes), statistics.median(sizes[-third:])
    if late > early * FLAT:
        faults.append(f"memory: expected it flat, found {early / 2**20:.0f} MiB, then {late / 2**20:.0f} MiB")
    print(f"{counts.finished} finished, {counts.left} left, {counts.tokens / seconds:.0f} tokens/s, "
          f"first text after {statistics.median(counts.first or [0]):.2f} s (median), "
          f"memory {early / 2**20:.0f} then {late / 2**20:.0f} MiB, {len(counts.faults)} faults")  # fmt: skip
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--model", default="surefoot-demo")
    args = parser.parse_args()
    wanted = ["--model", args.model, "--slots", str(args.slots), "--max-len", "1024"]
    # Those that left still wait until the next step, while the same client asks again.
    with started([*wanted, "--queue-limit", str(2 * args.clients)]) as server:
        faults = asyncio.run(load(server.url, server.process.pid, args.clients, args.seconds))
    code = server.process.returncode
    if code not in (0, -signal.SIGTERM):
        faults.append(f"exit: expected 0 or SIGTERM's, found {code}")
    for fault in faults[:20]:
        print(f"fault: {fault}", file=sys.stderr)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
