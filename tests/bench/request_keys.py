"""The cost of keys and batches on the service's thread: `python tests/bench/request_keys.py [--instructions]`.

Every figure is the cost of a span with keys less the cost of the same span without keys. The cost is to read the keys
of the call, to keep the keys with its row, and to write the keys for another process. The cost of a batch is also
printed for each key. Both spans take turns in one process, in blocks shorter than the time slice of the system. The
best block counts. The option `--instructions` counts instructions under valgrind instead, which no other load disturbs.
It takes a minute for each row, so name some rows with `--only`.

Each call is of another request of 64. The ids of the requests are texts of 36 characters. The bounds are 0.3 us for a
key, and 0.1 us for each key of a batch. A load of five to ten adds a quarter to each figure. On two shared x86-64 cores
under Python 3.11, with a load of one to three, in ns:

    a key, by a rule: an argument, or in an attribute or mapping, or of the result     100 to 145
    a key that is cut; a whole number                                                  110; 155
    a key of a coroutine, of a generator, of an async generator                        210, 190, 180
    scope(key=), bind; scope(kind="request", key=)                                     120, 165; 250
    each key of a batch                                            of 8       of 64      of 256
        a list, also by scope(batch=)                              39 to 45   21         20
        an attribute of each item                                  54         31         30
        a mapping that has the weights                             67         40         42
        attributes of each item as keys and as weights             92         59         58
        a mapping, keys cut                                        81         50         50
    where 2 MiB of other work were in the caches before each call, with a load of five to ten
        a key                                                      2700 to 10000
        a batch of 8                                               5000 to 12000, in all

A batch of any size takes some 350 ns in addition. Each of eight keys with more to read therefore takes more than 0.1
us. The whole cost is a wait for memory if other work was in the caches, as it is for a span without keys. The memory is
some eighty cache lines of code and data. Without the native reader a key took 900 to 2200 ns, and 17 to 25 us with cold
caches.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, NamedTuple

import instrument
from instrument.instrumentors.request_keys import make_call_reader
from instrument.profile.keys import loads
from instrument.recorder.recorder import RECORDER
from instrument.recording.spans import Site

CALLS = 256
BATCHES = (8, 64, 256)
FEW, MANY = 2_000, 12_000
WARM_UP = 131_072

IDS = [str(uuid.UUID(int=(number + 1) * 0x9E3779B97F4A7C15F39CC0605CEDC834 % (1 << 128))) for number in range(256)]


class Request:
    """A request object with the id by which the service identifies the request."""

    def __init__(self, request_id: str) -> None:
        self.request_id, self.tokens = request_id, len(request_id)


class Engine:
    """An engine with a batch of requests."""

    def __init__(self, ids: Sequence[str]) -> None:
        self.ids, self.requests = list(ids), [Request(one) for one in ids]
        self.num_tokens = {one: number for number, one in enumerate(ids)}

    def step(self) -> None: ...


def take(request: Any) -> Any:
    return request


async def take_awaited(request: Any) -> Any:
    return request


def generate(request: Any) -> Iterator[Any]:
    yield request


async def stream(request: Any) -> AsyncIterator[Any]:
    yield request


def call_each(function: Callable[[Any], object], given: Sequence[Any], calls: int) -> None:
    for _ in range(calls // len(given)):
        for one in given:
            function(one)


def exhaust_each(function: Callable[[Any], Any], given: Sequence[Any], calls: int) -> None:
    for _ in range(calls // len(given)):
        for one in given:
            for _item in function(one):
                pass


def await_each(function: Callable[[Any], Any], given: Sequence[Any], calls: int) -> None:
    async def repeat() -> None:
        for _ in range(calls // len(given)):
            for one in given:
                await function(one)

    _drive(repeat())


def exhaust_each_async(function: Callable[[Any], Any], given: Sequence[Any], calls: int) -> None:
    async def repeat() -> None:
        for _ in range(calls // len(given)):
            for one in given:
                async for _item in function(one):
                    pass

    _drive(repeat())


def _drive(coroutine: Any) -> None:
    # By hand: an event loop's own work would drown the difference.
    try:
        coroutine.send(None)
    except StopIteration:
        pass


def open_scope(**words: Any) -> None:
    with instrument.scope("scope", **words):
        pass


def open_scope_of_key(key: Any) -> None:
    with instrument.scope("scope", key=key):
        pass


def open_scope_of_batch(batch: Any) -> None:
    with instrument.scope("scope", batch=batch):
        pass


def open_bare_scope(_: Any) -> None:
    with instrument.scope("scope"):
        pass


def open_request_of_key(key: Any) -> None:
    with instrument.scope("request", kind="request", key=key):
        pass


def open_bare_request(_: Any) -> None:
    with instrument.scope("request", kind="request"):
        pass


def bind_in_scope(key: Any) -> None:
    with instrument.scope("scope"):
        instrument.bind(key)


class Shape(NamedTuple):
    """One way to say keys, and the same without."""

    name: str
    keyed: Callable[[int], None]
    plain: Callable[[int], None]
    keys: int = 1


Repeat = Callable[[Callable[[Any], Any], Sequence[Any], int], None]


def wrapped(name: str, rule: str, function: Callable[..., Any]) -> tuple[Any, Any]:
    """A function as a rule with keys selects it, and as one without."""
    (parsed,) = loads(f'functions: [{{match: "m:f", {rule}}}]').functions
    facts = make_call_reader(function, parsed)
    assert not facts.missing, facts.missing
    keyed = RECORDER.wrap(function, Site(name), facts.of_call, results=facts.of_result)
    return keyed, RECORDER.wrap(function, Site(f"{name}, plain"))


def of_rule(
    name: str, rule: str, function: Callable[..., Any], given: Sequence[Any], repeat: Repeat = call_each, keys: int = 1
) -> Shape:
    """The calls of a function that a rule with keys selects, and of the same by a rule without."""
    keyed, plain = wrapped(name, rule, function)
    return Shape(name, lambda calls: repeat(keyed, given, calls), lambda calls: repeat(plain, given, calls), keys)


def shapes() -> list[Shape]:
    ids = IDS[:64]
    requests = [Request(one) for one in ids]
    mappings = [{"body": {"id": one}} for one in ids]
    suffixed = [f"{one}-{number:08x}" for number, one in enumerate(ids)]
    found = [
        of_rule("key: argument", "key: request", take, ids),
        of_rule("key: attribute", "key: request.request_id", take, requests),
        of_rule("key: two mappings", "key: request.body.id", take, mappings),
        of_rule("key: result's attribute", "key: return.request_id", take, requests),
        of_rule("key: cut", 'key: {argument: request, cut: "-[0-9a-f]{8}$"}', take, suffixed),
        of_rule("key: whole number", "key: request", take, range(1000, 1064)),
        of_rule("key: coroutine", "key: request.request_id", take_awaited, requests, await_each),
        of_rule("key: generator", "key: request.request_id", generate, requests, exhaust_each),
        of_rule("key: async generator", "key: request.request_id", stream, requests, exhaust_each_async),
    ]
    for count in (1, 4, 8):
        facts = ", ".join(f"{{argument: request.tokens, name: tokens.{number}}}" for number in range(count))
        found.append(of_rule(f"facts: {count} of attributes", f"facts: [{facts}]", take, requests, keys=count))
        facts = facts.replace("request.", "return.")
        found.append(of_rule(f"facts: {count} of the result's", f"facts: [{facts}]", take, requests, keys=count))
    without = lambda repeated: lambda calls: call_each(open_bare_scope, repeated, calls)  # noqa: E731
    found += [
        Shape("scope(key=)", lambda calls: call_each(open_scope_of_key, ids, calls), without(ids)),
        Shape(
            "scope(kind=, key=)",
            lambda calls: call_each(open_request_of_key, ids, calls),
            lambda calls: call_each(open_bare_request, ids, calls),
        ),
        Shape("bind", lambda calls: call_each(bind_in_scope, ids, calls), without(ids)),
    ]
    for size in BATCHES:
        engines = [Engine(IDS[:size])]
        cut = Engine([f"{one}-{number:08x}" for number, one in enumerate(IDS[:size])])
        weighted = "batch: {argument: 'engine.requests[].request_id', weights: 'engine.requests[].tokens'}"
        lists = [engines[0].ids]
        of_engine: list[tuple[str, str, Engine]] = [
            ("list", "batch: self.ids", engines[0]),
            ("[] attribute", "batch: 'self.requests[].request_id'", engines[0]),
            ("mapping, weights", "batch: self.num_tokens", engines[0]),
            ("weights apart", weighted.replace("engine.", "self."), engines[0]),
            ("mapping, cut", 'batch: {argument: self.num_tokens, cut: "-[0-9a-f]{8}$"}', cut),
        ]
        found += [
            of_rule(f"batch of {size}: {how}", rule, Engine.step, [engine], keys=size)
            for how, rule, engine in of_engine
        ]
        found.append(
            Shape(
                f"batch of {size}: scope(batch=)",
                lambda calls, lists=lists: call_each(open_scope_of_batch, lists, calls),  # type: ignore[misc]
                lambda calls, lists=lists: call_each(open_bare_scope, lists, calls),  # type: ignore[misc]
                size,
            )
        )
    return found


HEAD = f"{'ns, or instructions':32}{'without':>9}{'with':>9}{'more':>9}{'a key':>9}"


def line(name: str, keys: int, plain: float, keyed: float) -> str:
    more = keyed - plain
    return f"{name:32}{plain:9.0f}{keyed:9.0f}{more:9.0f}{more / keys:9.0f}"


def measure(rounds: int, only: str) -> list[tuple[Shape, float, float]]:
    """The shapes, and what their spans take with keys and without, in ns."""
    every = [shape for shape in shapes() if only in shape.name]
    every[0].keyed(WARM_UP)  # the memory that others read has been written to by then, all of it
    found = []
    for shape in every:  # one by one: a row that is overwritten gives up its keys, and those are to be of its own shape
        best, calls = [float("inf"), float("inf")], CALLS if shape.keys == 1 else CALLS // 4
        for _ in range(rounds):
            for at, run in enumerate((shape.keyed, shape.plain)):
                began_ns = time.perf_counter_ns()
                run(calls)
                best[at] = min(best[at], (time.perf_counter_ns() - began_ns) / calls)
        found.append((shape, best[0], best[1]))
    return found


def measure_cold(rounds: int) -> Iterator[tuple[str, int, float, float]]:
    """Names, numbers of keys, and what spans take with keys and without where other work has used the caches."""
    swept, engine, requests = bytes(2 << 20), Engine(IDS[:8]), [Request(one) for one in IDS[:64]]
    for name, rule, function, given, keys in (
        ("key: attribute, cold", "key: request.request_id", take, requests, 1),
        ("batch of 8: list, cold", "batch: self.ids", Engine.step, [engine], 8),
    ):
        spent: tuple[list[int], list[int]] = [], []
        pair = wrapped(name, rule, function)
        for number in range(rounds):
            for function, times in zip(pair, spent, strict=True):
                one = given[number % len(given)]
                swept.count(b"\1")
                began_ns = time.perf_counter_ns()
                function(one)
                times.append(time.perf_counter_ns() - began_ns)
        yield name, keys, statistics.median(spent[0]), statistics.median(spent[1])


def counted(name: str, which: str, calls: int) -> int:
    command = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
    command += [sys.executable, __file__, "--run", name, which, str(calls)]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=environment)
    found = re.search(r"I\s+refs:\s+([\d,]+)", done.stderr)
    assert found is not None, done.stderr
    return int(found[1].replace(",", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--instructions", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.instructions:
        if shutil.which("valgrind") is None:
            sys.exit("asked for instructions, found no valgrind; install it (apt-get install valgrind)")
        print(HEAD)
        for shape in shapes():
            if asked.only not in shape.name:
                continue
            few, many = (FEW, MANY) if shape.keys == 1 else (640, 1280)
            keyed, plain = (
                (counted(shape.name, which, many) - counted(shape.name, which, few)) / (many - few)
                for which in ("keyed", "plain")
            )
            print(line(shape.name, shape.keys, plain, keyed))
        return
    instrument.start(loads("limits: {ring: 1MiB}"))  # which is full after some rounds, as one of weeks is
    if asked.run:
        name, which, calls = asked.run
        (shape,) = (shape for shape in shapes() if shape.name == name)
        (shape.keyed if which == "keyed" else shape.plain)(int(calls))
    else:
        print(HEAD)
        for shape, keyed, plain in measure(asked.rounds, asked.only):
            print(line(shape.name, shape.keys, plain, keyed))
        for name, keys, with_ns, without_ns in () if asked.only else measure_cold(4 * asked.rounds):
            print(line(name, keys, without_ns, with_ns))
    instrument.stop()


if __name__ == "__main__":
    main()
