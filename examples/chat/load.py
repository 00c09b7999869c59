"""Load generator: `python -m chat.load --url http://127.0.0.1:8000 --requests 300 --concurrency 32`.

The requests are the same on every run, so their answers can be saved and compared: `--save FILE`, then `--check FILE`.
"""

import argparse
import asyncio
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import httpx

MAX_REQUESTS = 100_000
_REQUEST_S = 30.0
_SUBJECTS = ["the sea", "a garden", "device memory", "the night train", "music", "a letter", "winter", "the cache"]
_WISHES = ["Tell me about {}", "What is the use of {}?", "Write one line about {}", "Why do we like {}, year by year?"]


@dataclass(frozen=True)
class Answer:
    """One request as the client saw it; times in seconds, `body` as it came, `error` empty if all was well."""

    body: str
    tokens: int
    total_s: float
    first_s: float | None
    error: str


def make_request(number: int) -> dict[str, object]:
    """The request of that number: three of four are streamed, every second one samples."""
    wish = _WISHES[number % len(_WISHES)].format(_SUBJECTS[number // len(_WISHES) % len(_SUBJECTS)])
    fields: dict[str, object] = {"prompt": wish, "max_tokens": 16 + number % 17, "stream": number % 4 != 3}
    return {**fields, "seed": number} if number % 2 else fields


async def run(url: str, requests: int, concurrency: int, seconds: float) -> list[Answer]:
    """Answers in the order of the requests; TimeoutError after `seconds`."""
    answers: dict[int, Answer] = {}
    numbers = iter(range(requests))
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=_REQUEST_S, limits=limits, trust_env=False) as client:
        await asyncio.wait_for(asyncio.gather(*(_work(client, numbers, answers) for _ in range(concurrency))), seconds)
    return [answers[number] for number in range(requests)]


def report(answers: list[Answer], wall_s: float, out: TextIO) -> None:
    """Print the table of a run that took `wall_s` seconds."""
    totals = sorted(answer.total_s for answer in answers)
    firsts = sorted(answer.first_s for answer in answers if answer.first_s is not None)
    rows = [
        ("requests", f"{len(answers)}"),
        ("errors", f"{sum(bool(answer.error) for answer in answers)}"),
        ("latency p50 / p99", f"{_quantile_ms(totals, 0.5)} / {_quantile_ms(totals, 0.99)} ms"),
        ("first token p50 / p99", f"{_quantile_ms(firsts, 0.5)} / {_quantile_ms(firsts, 0.99)} ms"),
        ("requests per second", f"{len(answers) / wall_s:.1f}"),
        ("tokens per second", f"{sum(answer.tokens for answer in answers) / wall_s:.1f}"),
        ("wall time", f"{wall_s:.2f} s"),
    ]
    for name, value in rows:
        print(f"{name:<24}{value:>20}", file=out)


def differences(answers: list[Answer], saved: Path) -> list[str]:
    """Return the answers that differ from those of an earlier run."""
    before: list[str] = json.loads(saved.read_text(encoding="utf-8"))
    if len(before) != len(answers):
        return [f"{saved} has {len(before)} answers, this run has {len(answers)}"]
    pairs = enumerate(zip(before, answers, strict=True))
    return [f"answer {number} differs from the one in {saved}" for number, (old, new) in pairs if old != new.body]


async def _work(client: httpx.AsyncClient, numbers: Iterator[int], answers: dict[int, Answer]) -> None:
    for number in numbers:
        answers[number] = await ask(client, make_request(number))


async def ask(client: httpx.AsyncClient, fields: dict[str, object]) -> Answer:
    """Send one request and read its answer to the end."""
    begin = time.perf_counter()
    first_s = None
    chunks = []
    try:
        async with client.stream("POST", "/generate", json=fields) as response:
            async for chunk in response.aiter_text():
                if first_s is None and fields["stream"]:
                    first_s = time.perf_counter() - begin
                chunks.append(chunk)
        status = response.status_code
    except httpx.HTTPError as fault:
        return Answer("".join(chunks), 0, time.perf_counter() - begin, first_s, repr(fault))
    body = "".join(chunks)
    total_s = time.perf_counter() - begin
    if status != 200:
        return Answer(body, 0, total_s, first_s, f"status {status}: {body[:200]}")
    tokens, error = _ending(body)
    return Answer(body, tokens, total_s, first_s, error)


def _ending(body: str) -> tuple[int, str]:
    """Number of tokens and what was wrong, from the JSON object at the end of a body or of its last event."""
    try:
        fields = json.loads(body.rpartition("data: ")[2])
        tokens, finish = int(fields["tokens"]), fields["finish"]
    except (ValueError, TypeError, KeyError):
        return 0, f"no proper end: {body[-200:]!r}"
    return tokens, "" if finish in ("end", "length") else f"finished as {finish}"


def _quantile_ms(ordered_s: list[float], share: float) -> str:
    """By nearest rank, as the tables of `instrument` do."""
    rank = max(1, math.ceil(round(share * len(ordered_s), 6)))
    return f"{ordered_s[rank - 1] * 1e3:.1f}" if ordered_s else "-"


def main() -> int:
    """Command line of the module: 0 if every answer was right, else 1."""
    parser = argparse.ArgumentParser(prog="python -m chat.load", description="send requests to chat.server")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--requests", type=int, default=300, help="how many (default: 300)")
    parser.add_argument("--concurrency", type=int, default=32, help="how many at a time (default: 32)")
    parser.add_argument("--seconds", type=float, default=120, help="give up after this time (default: 120)")
    files = parser.add_mutually_exclusive_group()
    files.add_argument("--save", type=Path, metavar="FILE", help="write the answers")
    files.add_argument("--check", type=Path, metavar="FILE", help="compare the answers with saved ones, byte for byte")
    options = parser.parse_args()
    if not 1 <= options.requests <= MAX_REQUESTS or options.concurrency < 1:
        parser.error(f"--requests must be from 1 to {MAX_REQUESTS}, --concurrency at least 1")
    begin = time.perf_counter()
    try:
        answers = asyncio.run(run(options.url, options.requests, options.concurrency, options.seconds))
    except asyncio.TimeoutError:
        print(f"no end after {options.seconds} s", file=sys.stderr)
        return 1
    report(answers, time.perf_counter() - begin, sys.stdout)
    faults = [f"request {number}: {answer.error}" for number, answer in enumerate(answers) if answer.error]
    if options.save:
        options.save.write_text(json.dumps([answer.body for answer in answers]), encoding="utf-8")
    if options.check:
        faults += differences(answers, options.check)
    for fault in faults[:10]:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
