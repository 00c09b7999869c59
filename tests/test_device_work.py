"""Device time where the work is: models and tensors on devices that are not the current one, on the fake driver."""

from __future__ import annotations

import asyncio
import gc
import pickle
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from driver import FakeDriver
from fake_torch_cuda import fake_torch

import instrument
from instrument.instrumentors.work import KEPT, SELDOM, CallWork, ModuleWork, find_tensor_nearby
from instrument.profile.keys import loads
from instrument.recorder.recorder import RECORDER
from instrument.recording.memory_layout import STREAM
from instrument.recording.spans import Work
from instrument.runtime.faults import FAULTS
from instrument.sessions.session import Session

MS = 10**6
NAME = "service_with_models"


class Device(NamedTuple):
    type: str
    index: int | None


class Tensor:
    """The part of a torch tensor that says on which device it is."""

    def __init__(self, index: int | None = None) -> None:
        self.device = Device("cpu" if index is None else "cuda", index)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"


class Module:
    """The part of a torch module that has tensors and children."""

    def __init__(self, *tensors: Tensor, buffers: tuple[Tensor, ...] = (), **children: Module) -> None:
        self.own, self.own_buffers = list(tensors), list(buffers)
        self.children = children
        for name, child in children.items():
            setattr(self, name, child)

    def parameters(self, recurse: bool = True) -> Iterator[Tensor]:
        yield from self.own
        for child in self.children.values() if recurse else ():
            yield from child.parameters()

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        yield from self.own_buffers
        for child in self.children.values() if recurse else ():
            yield from child.buffers()


class Torch(SimpleNamespace):
    """A torch that uses a device, without a driver."""

    def __init__(self, devices: int = 2, *, initialised: bool = True) -> None:
        cuda = SimpleNamespace(is_initialized=lambda: initialised, device_count=lambda: devices)
        super().__init__(cuda=cuda, Tensor=Tensor, nn=SimpleNamespace(Module=Module))


@pytest.fixture
def timed(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a recorder that asks a device timer, with a torch that has two devices."""
    monkeypatch.setitem(sys.modules, "torch", Torch())
    recorder.begin_device = lambda site, attributes, span_id: None
    return recorder


def devices(work: CallWork, *args: Any, **kwargs: Any) -> tuple[int, ...]:
    """Return the devices that a call works on."""
    told = work(args, kwargs)
    return () if told is None else told[STREAM].devices


class Service:
    def __init__(self, **names: Any) -> None:
        vars(self).update(names)

    def answer(self, x: Any = None) -> Any:
        return x

    @classmethod
    def build(cls) -> None: ...


def test_a_method_works_where_the_model_of_its_object_is(timed: Any) -> None:
    work = CallWork.make_for_function(timed, Service.answer)
    assert devices(work, Service(model=Module(Tensor(1)))) == (1,)
    assert devices(work, Service(parts={"encoder": Module(Tensor(0)), "decoder": Module(Tensor(1))})) == (0, 1)
    assert devices(work, Service(pipe=Service(tokenizer="", model=Module(Tensor(1), Tensor(0))))) == (0, 1)
    assert devices(work, Module(Tensor(1))) == (1,)
    assert devices(work, Module(Tensor(), buffers=(Tensor(1),))) == (1,)
    assert devices(
        CallWork.make_for_function(timed, Service.build.__func__), type("Made", (), {"model": Module(Tensor(1))})
    ) == (1,)  # type: ignore[attr-defined]


def test_the_model_reports_more_than_the_tensors_that_are_on_their_way_to_it(timed: Any) -> None:
    work = CallWork.make_for_function(timed, Service.answer)
    service = Service(model=Module(Tensor(1)))
    assert devices(work, service, Tensor(0)) == (1,)
    assert devices(work, Service(), Tensor(1)) == (1,)
    assert devices(work, Service(), x={"input": Tensor(1), "mask": Tensor()}) == (1,)
    assert devices(work, Service(), [Tensor(0), Tensor(1)]) == (0, 1)
    assert devices(work, Service(), Tensor()) == devices(work, Service()) == ()


HELD = Service(model=Module(Tensor(1)))


def test_a_function_works_where_the_model_is_that_it_gets_or_names(timed: Any) -> None:
    def run(model: Any, x: Any) -> Any:
        return x

    def named(x: Any) -> Any:
        return HELD, x

    closed_over = Module(Tensor(1))

    def closing(x: Any) -> Any:
        return closed_over, x

    assert devices(CallWork.make_for_function(timed, run), Module(Tensor(1)), Tensor(0)) == (1,)
    assert devices(CallWork.make_for_function(timed, run), None, Tensor(1)) == (1,)
    assert devices(CallWork.make_for_function(timed, named), Tensor(0)) == (1,)
    assert devices(CallWork.make_for_function(timed, closing), Tensor(0)) == (1,)
    assert devices(CallWork.make_for_function(timed, lambda: later)) == ()  # type: ignore[name-defined]  # noqa: F821
    assert devices(CallWork.make_for_function(timed, len), [Tensor(1)]) == (1,)


def test_a_model_that_moves_or_is_exchanged_is_followed(timed: Any) -> None:
    work = CallWork.make_for_function(timed, Service.answer)
    service = Service(model=Module(Tensor(1)))
    assert devices(work, service) == (1,)
    service.model.own[0].device = Device("cuda", 0)
    assert devices(work, service) == (0,)
    service.model = Module(Tensor(1))
    gc.collect()
    assert devices(work, service) == (1,)


def test_a_model_that_comes_later_is_found_and_looked_for_ever_more_seldom(
    timed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    found = instrument.instrumentors.work.find_models
    monkeypatch.setattr("instrument.instrumentors.work.find_models", lambda *args: looks.append(args) or found(*args))
    work, service = CallWork.make_for_function(timed, Service.answer), Service(model=None)
    for _ in range(100 * SELDOM):
        assert devices(work, service) == ()
    assert len(looks) < 200
    service.model = Module(Tensor(1))
    told = [devices(work, service) for _ in range(SELDOM + 1)]
    assert told[-1] == (1,)


def test_objects_that_come_and_go_leave_nothing_behind(timed: Any) -> None:
    work = CallWork.make_for_function(timed, Service.answer)
    for _ in range(3 * KEPT):
        assert devices(work, Service(model=Module(Tensor(1)))) == (1,)
    assert len(work._caches) <= KEPT


@pytest.mark.parametrize("torch", [None, Torch(1), Torch(initialised=False), SimpleNamespace()])
def test_a_call_is_not_examined_for_a_single_device(timed: Any, monkeypatch: pytest.MonkeyPatch, torch: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert CallWork.make_for_function(timed, Service.answer)((Service(model=Module(Tensor(1))),), {}) is None


def test_without_a_timer_nothing_is_looked_at(timed: Any) -> None:
    timed.begin_device = None
    assert CallWork.make_for_function(timed, Service.answer)((Service(model=Module(Tensor(1))),), {}) is None


def test_an_object_that_cannot_be_looked_into_costs_the_call_nothing(
    timed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Odd(Tensor):
        @property
        def is_cuda(self) -> bool:
            raise RuntimeError("theirs")

    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    assert CallWork.make_for_function(timed, Service.answer)((Service(), Odd()), {}) is None
    assert FAULTS.count_by_place()["device of a call"] == 1
    FAULTS.clear()


def test_a_copy_in_another_process_goes_by_the_arguments() -> None:
    work = CallWork.make_for_function(RECORDER, Service.answer)
    copied = pickle.loads(pickle.dumps(work))
    assert copied._is_method
    assert copied._recorder is RECORDER


def test_a_layer_without_parameters_works_where_its_neighbours_do() -> None:
    quiet, first, second, last = Module(), Module(Tensor(0)), Module(Tensor(1)), Module()
    inner = Module(a=Module(Tensor(1)), act=Module(), b=Module(Tensor(0)))
    root = Module(first=first, quiet=quiet, second=second, inner=inner, last=last)
    parents = {id(child): parent for parent in (root, inner) for child in parent.children.values()}

    def near(module: Module) -> list[int | None]:
        found = find_tensor_nearby(module, lambda one: parents.get(id(one)), lambda parent: parent.children.values())
        return [tensor.device.index for tensor in found]

    assert near(quiet) == [0]
    assert near(inner.act) == [1]  # type: ignore[attr-defined]
    assert near(last) == [0]  # what ran before it hands it its input
    assert near(root) == []
    alone = Module(Tensor(1), only=Module())
    parents[id(alone.only)] = alone  # type: ignore[attr-defined]
    assert near(alone.only) == [1]  # type: ignore[attr-defined]


def test_layers_whose_tensors_are_gone_work_where_they_last_were() -> None:
    tensors = [Tensor(1)]
    work = ModuleWork(tensors)
    assert work() == Work("torch", (1,))
    tensors.clear()
    gc.collect()
    assert work() == Work("torch", (1,))
    tensors.append(Tensor(0))
    work.watch_tensors(tensors)
    assert work() == Work("torch", (0,))


# In a session on the fake driver


@pytest.fixture
def torch(fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A torch with two devices in real time, each with a context, device 0 current.

    Each device is busy at first, so that what is measured begins after its launch, however late the thread is.
    """
    fake_driver.reset(virtual=False)
    made = fake_torch(fake_driver)
    made.Tensor, made.nn = Tensor, SimpleNamespace(Module=Module)
    monkeypatch.setitem(sys.modules, "torch", made)
    for device in (1, 0):
        made.cuda.set_device(device)
        made.work(300 * MS)
    yield made
    instrument.stop()
    assert fake_driver.synchronised() == 0


def settled(running: Session) -> Any:
    timing = running.recorded.timing
    assert timing is not None
    end, now_ns = time.monotonic() + 60, time.monotonic_ns()
    while not timing.has_device_times_until(now_ns):
        assert time.monotonic() < end, "the resolver does not come to an end"
        time.sleep(0.001)
    return running.trace()


def run_on(torch: Any, device: int, ms: int) -> None:
    """Run work as torch's device guard around an operator does."""
    before = torch._C._cuda_exchangeDevice(device)
    torch.work(ms * MS)
    torch._C._cuda_maybeExchangeDevice(before)


class Engine:
    """A service whose model is on another device than the current one, or on both."""

    def __init__(self, torch: Any, *on: int) -> None:
        self.torch = torch
        self.model = Module(*map(Tensor, on))

    def _work(self) -> None:
        for tensor in self.model.own:
            run_on(self.torch, tensor.device.index or 0, 30)

    def call(self) -> None:
        self._work()

    async def task(self) -> None:
        await asyncio.sleep(0)
        self._work()

    def tokens(self) -> Iterator[int]:
        self._work()
        yield 1
        self._work()

    async def stream(self) -> AsyncIterator[int]:
        self._work()
        yield 1
        self._work()


def drain(engine: Engine, name: str) -> None:
    """Call one of its methods to the end."""

    async def collect() -> None:
        async for _ in engine.stream():
            pass

    runs: dict[str, Callable[[], Any]] = {
        "call": engine.call,
        "task": lambda: asyncio.run(engine.task()),
        "tokens": lambda: list(engine.tokens()),
        "stream": lambda: asyncio.run(collect()),
    }
    runs[name]()


def lengths(trace: Any, name: str) -> dict[int, list[int]]:
    """By device, the ms of each interval that is no launch, which is as long as its work at least: 30 ms each."""
    found: dict[int, list[int]] = {}
    for span in trace.spans:
        for part in span.device if span.site.name.endswith(name) else ():
            if part.label != "launch-bound":
                found.setdefault(part.device, []).append(min(30, round((part.end_ns - part.start_ns) / MS)))
    return found


@pytest.mark.fake_driver
@pytest.mark.parametrize("attributes", ["", "attributes: [{argument: self, record: type}]"])
@pytest.mark.parametrize("name", ["call", "task", "tokens", "stream"])
@pytest.mark.parametrize("on", [(1,), (0, 1)])
def test_the_method_of_a_rule_is_timed_where_its_model_is(
    torch: Any, monkeypatch: pytest.MonkeyPatch, on: tuple[int, ...], name: str, attributes: str
) -> None:
    module = SimpleNamespace(Engine=type("Engine", (Engine,), {name: vars(Engine)[name], "__module__": NAME}))
    made = type(sys)(NAME)
    vars(made).update(vars(module))
    monkeypatch.setitem(sys.modules, NAME, made)
    running = instrument.start(loads(f'functions: [{{match: "{NAME}:Engine.{name}", device: true, {attributes}}}]'))
    assert running is not None
    engine = made.Engine(torch, *on)
    drain(engine, name)
    trace = settled(running)
    times = 2 if name in ("tokens", "stream") else 1
    assert lengths(trace, name) == {device: [30] * times for device in on}
    (span,) = [span for span in trace.spans if span.site.name.endswith(name)]
    recorded = {"self.type": f"{NAME}.Engine"} if attributes else {}
    items = {"first_item_ns", "last_item_ns", "items", "longest_gap_ns"}
    assert {key: value for key, value in span.attributes.items() if key not in items} == recorded


@pytest.mark.fake_driver
def test_a_decorated_function_is_timed_where_its_tensors_are(torch: Any) -> None:
    @instrument.profiled("step", device=True)
    def step(x: Tensor, *, work: Callable[..., None]) -> None:
        work(torch, 1, 30)

    running = instrument.start(loads(""))
    assert running is not None
    step(Tensor(1), work=run_on)
    assert lengths(settled(running), "step") == {1: [30]}


@pytest.mark.fake_driver
def test_a_stream_that_is_named_wins(torch: Any) -> None:
    running = instrument.start(loads(""))
    assert running is not None
    side = torch.cuda.Stream(1)
    with torch.cuda.stream(side):
        torch.work(300 * MS)
    with instrument.scope("named", stream=side), torch.cuda.stream(side):
        torch.work(30 * MS)
    assert lengths(settled(running), "named") == {1: [30]}
