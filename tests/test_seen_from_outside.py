"""Functions that are recorded, as the service sees them: from outside they are the functions that they were."""

from __future__ import annotations

import asyncio
import collections.abc
import contextlib
import copy
import functools
import importlib
import inspect
import itertools
import logging
import pickle
import subprocess
import sys
import traceback
import types
import typing
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from readback import spans_in

from instrument import profiled
from instrument.instrumentors.selection import Selection
from instrument.recording.spans import Site

KINDS_OF_THINGS = (
    collections.abc.Awaitable, collections.abc.Coroutine, collections.abc.Iterable, collections.abc.Iterator,
    collections.abc.Generator, collections.abc.AsyncIterable, collections.abc.AsyncIterator,
    collections.abc.AsyncGenerator, collections.abc.Callable,
)  # fmt: skip
COUNTER = itertools.count()


def plain(a: int, b: int = 2, *rest: int, c: int = 3, **more: int) -> tuple[int, int]:
    """A plain one."""
    return a, b


def generator(a: int = 1) -> Iterator[int]:
    """A generator."""
    yield a


async def coroutine(a: int = 1) -> int:
    """A coroutine."""
    return a


async def async_generator(a: int = 1) -> Any:
    yield a


@types.coroutine
def awaitable(a: int = 1) -> Any:
    yield
    return a


@functools.cache
def cached(a: int = 1) -> int:
    """The next number, kept."""
    return next(COUNTER)


@contextlib.contextmanager
def managed(a: int = 1) -> Iterator[int]:
    yield a


def retried(a: int = 1) -> int:
    """A function that a decorator has made, which says what it decorates."""
    return a


retried.__wrapped__ = plain  # type: ignore[attr-defined]
FUNCTIONS = [plain, generator, coroutine, async_generator, awaitable, cached, managed, retried]


@pytest.fixture(params=FUNCTIONS, ids=lambda function: function.__name__)
def pair(request: pytest.FixtureRequest, recorder: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Return a function and its recorded twin, which replaces it."""
    bare = request.param
    made = recorder.wrap(bare, Site("x"))
    monkeypatch.setattr(sys.modules[__name__], bare.__name__, made)
    return made, bare


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Write modules into a folder on the path, which are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def make(**sources: str) -> None:
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()

    yield make
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


def _signature(function: Any) -> Any:
    return str(inspect.signature(function))


def test_inspection_of_a_function_is_unchanged(pair: tuple[Any, Any]) -> None:
    made, bare = pair
    looks: list[Callable[[Any], Any]] = [
        lambda f: f.__class__, lambda f: {f.__class__, type(f)} == {type(bare)}, lambda f: {type(bare): 5}[type(f)],
        lambda f: f.__dict__ is bare.__dict__, dir, repr, vars, _signature, inspect.getsource, inspect.getdoc,
        lambda f: f.__name__, lambda f: f.__qualname__, lambda f: f.__module__, lambda f: f.__doc__,
        lambda f: f.__annotations__, typing.get_type_hints, lambda f: inspect.unwrap(f).__code__,
        lambda f: getattr(f, "__wrapped__", None), lambda f: getattr(f, "__code__", None),
        lambda f: getattr(f, "__defaults__", None), lambda f: getattr(f, "__kwdefaults__", None),
        lambda f: getattr(f, "__closure__", None), lambda f: getattr(f, "__globals__", None),
        lambda f: f.cache_parameters() if hasattr(f, "cache_parameters") else None,
        inspect.isfunction, inspect.isroutine, inspect.iscoroutinefunction, inspect.isgeneratorfunction,
        inspect.isasyncgenfunction, inspect.getmodule,
        lambda f: [isinstance(f, kind) for kind in (types.FunctionType, functools._lru_cache_wrapper)],
    ]  # fmt: skip
    for look in looks:
        assert look(made) == look(bare), inspect.getsource(look)
    assert copy.copy(made) is made
    assert copy.deepcopy(made) is made
    made.mark = 5
    assert bare.mark == 5
    del bare.mark
    assert not hasattr(made, "mark")


def test_the_result_of_a_wrapped_call_keeps_its_kind(pair: tuple[Any, Any]) -> None:
    made, bare = pair
    ours, theirs = made(1), bare(1)
    for kind in KINDS_OF_THINGS:
        assert isinstance(ours, kind) == isinstance(theirs, kind)
    assert ours.__class__ is theirs.__class__
    assert type(ours) == type(theirs)  # noqa: E721 - as tables by type see it
    assert dir(ours) == dir(theirs)
    for look in (inspect.isawaitable, inspect.iscoroutine, inspect.isgenerator, inspect.isasyncgen):
        assert look(ours) == look(theirs)
    for name in ("__name__", "__qualname__", "gi_code", "cr_code", "ag_code", "gi_running", "cr_await", "ag_await"):
        assert getattr(ours, name, None) == getattr(theirs, name, None)
    for thing in (ours, theirs):
        if hasattr(thing, "close"):
            thing.close()


def test_a_function_pickles_by_name_and_by_value_as_it_did(pair: tuple[Any, Any]) -> None:
    made, bare = pair
    assert pickle.loads(pickle.dumps(made)) is made
    for library in map(
        pytest.importorskip, ("cloudpickle", *["dill"] * (bare.__name__ != "cached"))
    ):  # by value always
        assert library.loads(library.dumps(made)) is made


@pytest.mark.parametrize("library", ["cloudpickle", "dill"])
@pytest.mark.parametrize("kind", ["plain", "generator", "coroutine", "cached"])
def test_a_nested_function_goes_by_value_where_it_did(library: str, kind: str) -> None:
    dumps = pytest.importorskip(library).dumps
    if (library, kind) == ("cloudpickle", "cached"):
        pytest.skip("cloudpickle takes no nested one of lru_cache by value")

    def made(decorator: Callable[[Any], Any]) -> Any:
        def plain(x: int) -> int:
            return x * 3

        def generator(x: int) -> Iterator[int]:
            yield x * 3

        async def coroutine(x: int) -> int:
            return x * 3

        functions = {"plain": plain, "generator": generator, "coroutine": coroutine}
        return decorator(functions[kind] if kind in functions else functools.lru_cache(plain))

    ours = made(profiled)
    assert dumps(ours) == dumps(ours.__instrument_function__)


def test_a_cache_by_content_notices_that_a_function_has_changed(
    write: Callable[..., None], select: Callable[[str], Selection], recorder: Any
) -> None:
    joblib, dill = pytest.importorskip("joblib"), pytest.importorskip("dill")
    sources = {f"by_content_{i}": f"def encode(x):\n    return x * {i}\n" for i in (10, 100)}
    write(**sources)
    hashes = []
    for name in sources:
        module = importlib.import_module(name)
        module.encode.__module__ = "__main__"  # as of the service's own script
        bare = dill.dumps(module.encode)
        selection = select(f'functions: [{{match: "{name}:encode"}}]')
        assert dill.dumps(module.encode) == bare
        hashes.append((bare, joblib.hash(module.encode.__code__.co_consts)))
        selection.detach_all()
    assert hashes[0] != hashes[1]


def test_callers_of_wrapped_bypass_us_like_a_decorator(
    write: Callable[..., None], select: Callable[[str], Selection], recorder: Any
) -> None:
    write(
        past="""
import contextlib, functools, itertools
counter = itertools.count()
@functools.lru_cache(maxsize=None)
def version(key):
    return next(counter)
def retry(function):
    @functools.wraps(function)
    def inner(*args):
        inner.tries = 0
        for _ in range(3):
            inner.tries += 1
            with contextlib.suppress(ConnectionError):
                return function(*args)
    return inner
@retry
def fetch(x):
    raise ConnectionError(x)
@contextlib.contextmanager
def session():
    yield "s"
def compiled(*args, __wrapper=None):
    __wrapper.__code__ = made.__code__
    return __wrapper(*args)
compiled.__kwdefaults__["__wrapper"] = compiled
def made(*args, __wrapper=None):
    return args
"""
    )
    module = importlib.import_module("past")
    selection = select('functions: [{match: "past:*"}]')
    assert [module.version("a"), module.version("a"), module.version.__wrapped__("a")] == [0, 0, 1]
    with pytest.raises(ConnectionError):
        module.fetch.__wrapped__(1)
    assert (module.fetch(1), module.fetch.tries) == (None, 3)
    assert list(module.session.__wrapped__()) == ["s"]
    assert [module.compiled(1, 2), module.compiled(3)] == [(1, 2), (3,)]
    selection.detach_all()
    assert not [name for name, value in vars(module).items() if hasattr(value, "__instrument__")]


# -------------------------------------------------------------------- frames

LIBRARY = """
import collections, logging, sys, warnings
log = logging.getLogger("lib")
def caller():
    frame = sys._getframe(2)
    return frame.f_code.co_name, frame.f_globals["__name__"]
def plain(x=1): return caller()
def attribute(x=1): return caller()
def request(x=1): return caller()
def keyed(x=1): return caller()
def generator(x=1): yield caller()
async def coroutine(x=1): return caller()
async def async_generator(x=1): yield caller()
class Kind:
    def method(self): return caller()
def deprecated(): warnings.warn("old", DeprecationWarning, stacklevel=2)
def deprecated_generator():
    warnings.warn("old", DeprecationWarning, stacklevel=2)
    yield
def logged(): log.warning("logged", stacklevel=2)
def named(): return collections.namedtuple("P", "a b").__module__
def export(): sys._getframe(1).f_globals["injected"] = 1
def fails(): raise KeyError("f")
def failing_generator(): yield fails()
async def failing_coroutine(): return fails()
async def failing_async_generator(): yield await failing_coroutine()
"""
SERVICE = """
import asyncio, framed
def look():
    found = [framed.plain(), framed.attribute(3), framed.request(), framed.keyed(2), framed.Kind().method()]
    found += [next(framed.generator()), *framed.generator()]
    framed.deprecated(), list(framed.deprecated_generator()), framed.logged(), framed.export()
    return found
async def wait():
    return [await framed.coroutine(), *[item async for item in framed.async_generator()]]
def fail(): return framed.fails()
def fail_in_a_generator(): return list(framed.failing_generator())
def fail_in_a_coroutine(): return asyncio.run(framed.failing_coroutine())
async def iterate(): return [item async for item in framed.failing_async_generator()]
def fail_in_an_async_generator(): return asyncio.run(iterate())
"""
FRAMES_RULES = """
functions:
  - {match: "framed:attribute", attributes: {argument: x, record: value}}
  - {match: ["framed:request", "framed:*fail*"], kind: request}
  - {match: "framed:keyed", kind: phase, key: x}
  - {match: ["framed:*", "!framed:caller"]}
  - {match: "framed:Kind.*"}
"""


def test_no_frame_of_ours_is_between_a_function_and_its_caller(
    write: Callable[..., None],
    select: Callable[[str], Selection],
    recorder: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write(framed=LIBRARY, service=SERVICE)

    def seen() -> list[Any]:
        service: Any = importlib.import_module("service")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = [service.look(), asyncio.run(service.wait()), service.framed.named(), service.injected]
        found += [(Path(warning.filename).name, warning.lineno) for warning in caught]
        logs = [record for record in caplog.records if record.name == "lib"]
        found += [(record.filename, record.lineno, record.funcName) for record in logs]
        caplog.clear()
        for name in ("fail", "fail_in_a_generator", "fail_in_a_coroutine", "fail_in_an_async_generator"):
            try:
                getattr(service, name)()
            except KeyError as error:
                frames = traceback.extract_tb(error.__traceback__)
                found.append([(Path(frame.filename).name, frame.lineno, frame.name) for frame in frames])
        return found

    logging.getLogger("lib").setLevel(logging.WARNING)
    expected = seen()
    select(FRAMES_RULES)
    assert seen() == expected
    names = {span.site.name for span in spans_in(recorder)}
    assert {"plain", "request", "generator", "coroutine", "async_generator", "failing_async_generator"} <= names
    assert recorder.current_span_id() == 0


def test_a_function_of_the_script_goes_by_value_into_another_process(tmp_path: Path) -> None:
    pytest.importorskip("dill")
    (tmp_path / "p.yaml").write_text('functions: [{match: "__main__:*"}]\nexport: {summary: {to: sum.txt}}\n')
    (tmp_path / "script.py").write_text("""
import dill, subprocess, sys
dill.settings["recurse"] = True
def helper(x):
    return x + 1
def work(x):
    return helper(x) * 2
if __name__ == "__main__":
    code = "import sys, dill; print(dill.loads(sys.stdin.buffer.read())(1))"
    done = subprocess.run([sys.executable, "-c", code], input=dill.dumps(work), capture_output=True)
    print("other process:", done.stdout.decode().strip(), done.stderr.decode()[-200:])
""")
    command = [sys.executable, "-m", "instrument", "run", "--profile", "p.yaml", "--", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "other process: 4", done.stderr
