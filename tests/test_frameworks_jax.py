"""JAX on the host: jitted functions, transfers and waits, recorded and otherwise as they were."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from readback import spans_in
from trees import outline, tree

from instrument.instrumentors.jax_keras_sklearn import JAX_FUNCTIONS
from instrument.instrumentors.selection import Selection
from instrument.recorder.recorder import Recorder

PROFILE = "frameworks: [jax]"


@pytest.fixture(scope="module", autouse=True)
def late_imports() -> None:
    """Imported by the first test: this file is collected by every process of the tests and run by one."""
    global np, jax, jnp, X, ARRAY
    np = pytest.importorskip("numpy")
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp

    X = np.ones(3, np.float32)
    ARRAY = type(jnp.asarray(X))


def test_calls_of_a_jitted_function_are_spans_under_its_own_name(
    recorder: Recorder, select: Callable[[str], Selection]
) -> None:
    select(PROFILE)

    @jax.jit
    def step(x: Any) -> Any:
        return jnp.sin(x) * 2

    for _ in range(2):
        assert np.allclose(step(X), np.sin(X) * 2)
    assert tree(recorder) == "step\nstep" or tree(recorder).endswith(".step\n" + tree(recorder).split("\n")[0])
    site = spans_in(recorder)[0].site
    assert (site.kind, site.file, site.module) == ("op", __file__, __name__)


def test_transfers_and_waits_are_spans_once_each(recorder: Recorder, select: Callable[[str], Selection]) -> None:
    select(PROFILE)
    there = jax.device_put(X)
    assert there.block_until_ready() is there
    assert jax.block_until_ready(there) is there
    jax.block_until_ready([there, there])
    assert tree(recorder) == outline(
        """
        jax.device_put
        jax.block_until_ready
        jax.block_until_ready
        jax.block_until_ready
        """
    )


def test_code_that_jax_traces_records_nothing(recorder: Recorder, select: Callable[[str], Selection]) -> None:
    select(PROFILE)
    traced: list[None] = []

    @functools.partial(jax.jit, static_argnums=1)
    def inner(x: Any, times: int) -> Any:
        traced.append(None)
        return jax.device_put(x) * times

    @jax.jit
    def outer(x: Any) -> Any:
        return inner(x, 3) + 1

    assert np.allclose(outer(X), X * 3 + 1)
    assert np.allclose(jax.vmap(outer)(X), X * 3 + 1)
    assert len(traced) >= 1
    assert [line.rpartition(".")[2] for line in tree(recorder).split("\n")] == ["outer"]


def test_a_jitted_function_keeps_its_attributes_signature_and_methods(select: Callable[[str], Selection]) -> None:
    def plain(x: Any, *, scale: float = 2.0) -> Any:
        """Scales."""
        return x * scale

    before = jax.jit(plain)
    select(PROFILE)
    after = jax.jit(plain)
    optioned = jax.jit(static_argnames="scale")(plain)
    assert inspect.signature(after) == inspect.signature(before)
    assert (after.__name__, after.__qualname__, after.__doc__, after.__module__) == (
        before.__name__,
        before.__qualname__,
        before.__doc__,
        before.__module__,
    )
    assert {name for name in dir(before) if not name.startswith("__")} <= set(dir(after))
    assert isinstance(after, jax.stages.Wrapped)
    assert isinstance(after, type(before))
    assert jax.jit(after, static_argnames="scale").lower(X, scale=3.0).compile()(X).tolist() == (X * 3).tolist()
    assert after.lower(X).compile()(X).tolist() == before(X).tolist() == optioned(X, scale=2.0).tolist()
    assert after.eval_shape(X).shape == (3,)
    assert jax.eval_shape(after, X).shape == (3,)
    assert str(jax.make_jaxpr(after)(X)) == str(jax.make_jaxpr(before)(X))

    class Model:
        @jax.jit
        def __call__(self, x: Any) -> Any:
            return x + 1

    jax.tree_util.register_pytree_node(Model, lambda m: ((), None), lambda _, __: Model())
    assert Model()(X).tolist() == (X + 1).tolist()


def test_functions_made_of_the_same_code_share_a_site_and_none_is_kept_alive(
    recorder: Recorder, select: Callable[[str], Selection]
) -> None:
    select(PROFILE)

    def make(scale: float) -> Any:
        @jax.jit
        def scaled(x: Any) -> Any:
            return x * scale

        return scaled

    made = [make(float(n)) for n in range(3)]
    assert [function(X)[0].item() for function in made] == [0, 1, 2]
    assert len({span.site for span in spans_in(recorder)}) == 1
    gone = weakref.ref(made.pop().__wrapped__)
    jax.clear_caches()
    gc.collect()
    assert gone() is None


@pytest.fixture
def host() -> Any:
    """A module of the host that names what was jitted before we came."""
    module = ModuleType("host_of_jax")
    module.jit, module.double = jax.jit, jax.jit(lambda x: x * 2)  # type: ignore[attr-defined]
    sys.modules["host_of_jax"] = module
    yield module
    del sys.modules["host_of_jax"]


def test_a_late_start_reaches_what_the_hosts_modules_name_and_gives_it_back(
    recorder: Recorder, select: Callable[[str], Selection], host: Any
) -> None:
    before = host.jit, host.double
    kept, other = host.double, [jax.jit(lambda x: x * 3)]
    selection = select(PROFILE)
    (verdict,) = [verdict for verdict in selection.verdicts() if verdict.state == "partly"]
    assert "were created before, and no module has a name of them" in verdict.why
    assert selection.late[-1] == "jax"
    host.double(X)
    host.half = host.jit(lambda x: x / 2)
    host.half(X)
    kept(X)
    other[0](X)
    assert len(spans_in(recorder)) == 2
    selection.detach_all()
    assert (host.jit, host.double) == before
    assert type(host.half) is type(kept)
    assert host.half(X).tolist() == (X / 2).tolist()
    assert len(spans_in(recorder)) == 2


def test_undo_restores_the_very_same_functions_and_jax_keeps_its_own(select: Callable[[str], Selection]) -> None:
    places = [(jax, name) for name in ("jit", *JAX_FUNCTIONS)] + [
        (jax._src.api, name) for name in ("jit", *JAX_FUNCTIONS)
    ]
    before = [getattr(*place) for place in places], vars(ARRAY)["block_until_ready"]
    selection = select("frameworks: auto")
    assert [getattr(*place) is was for place, was in zip(places, before[0], strict=True)] == [False] * 3 + [True] * 3
    selection.detach_all()
    assert ([getattr(*place) for place in places], vars(ARRAY)["block_until_ready"]) == before


def test_functions_jitted_in_a_session_work_after_it_and_record_in_no_other(
    recorder: Recorder, select: Callable[[str], Selection]
) -> None:
    selection = select(PROFILE)
    kept = [jax.jit(lambda x: x + 1)]
    selection.detach_all()
    assert kept[0](X).tolist() == (X + 1).tolist()
    assert spans_in(recorder) == []


def test_an_exception_passes_and_marks_the_span(recorder: Recorder, select: Callable[[str], Selection]) -> None:
    select(PROFILE)

    @jax.jit
    def fail(x: Any) -> Any:
        raise LookupError("theirs")

    with pytest.raises(LookupError, match="theirs"):
        fail(X)
    assert tree(recorder).endswith("fail !LookupError")


def test_entry_points_missing_in_a_version_are_named(
    select: Callable[[str], Selection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(jax, "block_until_ready")
    texts = [str(verdict) for verdict in select(PROFILE).verdicts() if verdict.state != "partly"]
    assert texts == [
        "jax: jax.jit: attached",
        "jax: jax.device_put: attached",
        f"jax: jax.block_until_ready: unreachable (jax {jax.__version__} has none)",
        "jax: Array.block_until_ready: attached",
    ]
