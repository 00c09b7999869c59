"""Copies of every framework but torch: real packages where they run without a GPU, stand-ins with behaviour elsewhere.

Each program runs in a process of its own, because a framework looks at its environment when it is imported. The rules
are attached before the framework is there, as in a service that starts with `instrument run`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from driver import environment, why_not
from trees import outline

HERE = Path(__file__).parent

START = """
import sys
from instrument.instrumentors.selection import Selection
from instrument.profile.keys import loads
from instrument.recorder.recorder import RECORDER

ALL = "copies: [{{directions: [h2d, d2h, d2d, p2p, h2h], frameworks: {framework}}}]"
selection = Selection(loads(ALL))
selection.attach()
RECORDER.begin_recording(1 << 24, {{}})
RECORDER.on = True
sys.path.append("{here}")
"""
END = """
from readback import spans_in
for span in sorted(spans_in(RECORDER), key=lambda span: span.span_id):
    facts = dict(span.site.attributes)
    words = [facts["direction"], str(span.attributes["bytes"]), *["async"] * (not facts["sync"])]
    print(*words, *["pinned"] * bool(facts.get("pinned")), span.site.function)
RECORDER.on = False
verdicts = [str(verdict) for verdict in selection.verdicts()]
assert "attached" in verdicts[0], verdicts
assert len(verdicts) == 2, verdicts
assert verdicts[1].startswith("copies: {framework}: partly (not seen: "), verdicts
selection.detach_all()
from types import FunctionType
left = [name for name, module in list(sys.modules.items()) for value in vars(module).values()
        if type(value) is FunctionType and value.__code__.co_filename.endswith("/copies.py")
        and name.partition(".")[0] != "instrument"]
assert left == [], left
"""


def run(framework: str, program: str, **environ: str) -> str:
    """Return the copies of a program, a line each: direction, bytes, unusual facts, and the call that made it."""
    text = START.format(framework=framework, here=HERE) + textwrap.dedent(program) + END.format(framework=framework)
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTEST_CURRENT_TEST": "inside", **environ},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.rstrip()


def need(*names: str) -> None:
    for name in names:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


@pytest.fixture(scope="module")
def driver() -> Callable[[], dict[str, str]]:
    """The environment of a process that finds the CUDA driver of `fake_driver.c`."""
    if reason := why_not():
        pytest.skip(reason)
    return environment


def test_numpy_copies_from_host_to_host_into_a_given_array() -> None:
    need("numpy")
    program = """
        import numpy
        batch = numpy.zeros((2, 8))
        numpy.copyto(batch, numpy.ones((2, 8)))
        numpy.copyto(batch[0], numpy.ones(8), where=True)
        numpy.copyto(batch, 7)         # a fill
        numpy.copyto(batch, batch)     # itself
        assert batch.sum() == 112
    """
    assert run("numpy", program) == "h2h 128 numpy.copyto\nh2h 64 numpy.copyto"


@pytest.mark.slow
def test_numpy_that_numba_and_torch_compile_is_left_as_it_is() -> None:
    need("numba", "torch")
    program = """
        import numpy, numba, torch
        numpy.copyto(numpy.zeros(2), numpy.ones(2))
        copied = lambda x: numpy.copy(x).sum()
        assert numba.njit(copied)(numpy.ones(3)) == 3
        assert torch.compile(copied, backend="eager", fullgraph=True)(numpy.ones(3)) == 3
        selection.detach_all()
        assert numba.njit(lambda x: numpy.copy(x).sum())(numpy.ones(3)) == 3
        selection.attach()
        numpy.copyto(numpy.zeros(2), numpy.ones(2))
    """
    assert "h2h 16 numpy.copyto" in run("numpy", program)


CUDA_DRIVER = """
    import numpy
    from cuda.bindings import driver
    from cuda.bindings.driver import cuMemcpyDtoD, cuMemcpyDtoH
    def check(result):
        assert int(result[0]) == 0, result
        return result[1:]
    check(driver.cuInit(0))
    first, second = (check(driver.cuDevicePrimaryCtxRetain(number))[0] for number in (0, 1))
    check(driver.cuCtxSetCurrent(first))
    (there,), (other,) = check(driver.cuMemAlloc(64)), check(driver.cuMemAlloc(64))
    (stream,) = check(driver.cuStreamCreate(0))
    host, back = numpy.arange(8.0), numpy.zeros(8)
    check(driver.cuMemcpyHtoD(there, host.ctypes.data, 64))
    check(cuMemcpyDtoD(other, there, ByteCount=64))
    check(cuMemcpyDtoH(back.ctypes.data, other, 64))
    assert back.tolist() == host.tolist()
    check(driver.cuMemcpyHtoDAsync(there, host.ctypes.data, 32, stream))
    check(driver.cuMemcpyPeer(other, second, there, first, 16))
    check(driver.cuMemcpyPeer(other, first, there, first, 16))
    check(driver.cuMemcpy(other, there, 8))
    assert int(driver.cuMemcpyHtoD(0, host.ctypes.data, 64)[0]) != 0
    check(driver.cuMemcpyHtoD(there, host.ctypes.data, 0))
    copy = driver.CUDA_MEMCPY2D()
    copy.srcMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_HOST
    copy.srcDevice, copy.dstHost = there, back.ctypes.data
    copy.srcPitch = copy.dstPitch = copy.WidthInBytes = 16
    copy.Height = 2
    check(driver.cuMemcpy2D(copy))
"""


def test_cuda_python_copies_by_the_names_of_its_functions(driver: Callable[[], dict[str, str]]) -> None:
    need("numpy", "cuda")
    need("cuda.bindings")
    assert run("cuda", CUDA_DRIVER, **driver()) == outline(
        """
        h2d 64 cuda.cuMemcpyHtoD
        d2d 64 cuda.cuMemcpyDtoD
        d2h 64 cuda.cuMemcpyDtoH
        h2d 32 async cuda.cuMemcpyHtoDAsync
        p2p 16 cuda.cuMemcpyPeer
        d2d 16 cuda.cuMemcpyPeer
        d2h 32 cuda.cuMemcpy2D
        """
    )


def test_every_copy_function_of_cuda_python_is_known_or_named_as_unseen() -> None:
    need("cuda")
    need("cuda.bindings")
    program = """
        from cuda.bindings import driver, runtime
        plain = {name for module in (driver, runtime) for name, value in vars(module).items()
                 if "emcpy" in name and "Graph" not in name and callable(value) and not isinstance(value, type)
                 and not hasattr(value, "__wrapped__")}
        families = ("3D", "Batch", "WithAttributes", "cuMemcpyAsync", "cuMemcpy", "Array")
        odd = [name for name in plain if not name.startswith("cuda") and not any(word in name for word in families)]
        assert odd == [], odd
        assert "cuMemcpyAtoH" not in plain and "cudaMemcpyPeerAsync" not in plain and "cudaMemcpy2DAsync" not in plain
        selection._families["copies"].hits[0] = 1
    """
    assert run("cuda", program) == ""


NUMBA = """
    import numpy
    from numba import cuda
    x = numpy.arange(8.0)
    there = cuda.to_device(x)
    assert there.copy_to_host().tolist() == x.tolist()
    buffer = cuda.pinned_array(8)
    buffer[:] = 1
    there.copy_to_device(buffer, stream=cuda.stream())
    there.copy_to_host(buffer, stream=cuda.stream())
    other = cuda.device_array_like(there)
    other.copy_to_device(there)
    cuda.to_device(x[:0])
    assert other.copy_to_host().sum() == 8
"""


@pytest.mark.slow
def test_numba_copies_by_its_driver(driver: Callable[[], dict[str, str]]) -> None:
    need("numba", "numba_cuda", "numpy")
    assert run("numba", NUMBA, **driver()) == outline(
        """
        h2d 64 numba.host_to_device
        d2h 64 numba.device_to_host
        h2d 64 async pinned numba.host_to_device
        d2h 64 async pinned numba.device_to_host
        d2d 64 numba.device_to_device
        d2h 64 numba.device_to_host
        """
    )


def test_one_copy_that_passes_through_two_frameworks_is_one_span(driver: Callable[[], dict[str, str]]) -> None:
    need("numba", "numba_cuda", "numpy")
    program = """
        import numpy
        from cuda.bindings import driver
        from numba import cuda
        from readback import spans_in
        cuda.to_device(numpy.arange(8.0))
        assert len(spans_in(RECORDER)) == 1
    """
    text = run("numba", program, **driver())
    assert text == "h2d 64 numba.host_to_device"


CUPY = """
    import numpy
    import cupy
    from cupy import asnumpy
    x = numpy.arange(8.0)
    there = cupy.asarray(x)
    assert asnumpy(there).tolist() == x.tolist()
    assert asnumpy(x) is x
    assert cupy.asarray(there) is there
    cupy.array(there)
    there.set(x, stream=cupy.cuda.Stream())
    pinned = cupy.PinnedMemoryPointer(64).array()
    pinned[...] = x
    there.set(pinned)
    with cupy.cuda.Device(1):
        cupy.asarray([1.0, 2.0], blocking=True)
        other = cupy.empty(8)
        cupy.copyto(other, there)
        cupy.copyto(other, 3.0)
    there.get(out=numpy.empty(8), blocking=False)
    assert (there + other).tolist()[1] == 4.0
    assert float(cupy.asarray(2.5)) == 2.5
    cupy.cuda.runtime.memcpy(there.data.ptr, x.ctypes.data, 64, 1)
    cupy.cuda.runtime.memcpyAsync(x.ctypes.data, there.data.ptr, 32, 2, 7)
    cupy.cuda.runtime.memcpyPeer(other.data.ptr, 1, there.data.ptr, 0, 64)
    cupy.cuda.runtime.memcpy(other.data.ptr, there.data.ptr, 64, 4)
    cupy.array([there, there])
"""


def test_cupy_copies_by_its_arrays_and_its_runtime(tmp_path: Path) -> None:
    need("numpy")
    shutil.copy(HERE / "fake_cupy.py", tmp_path / "cupy.py")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    assert run("cupy", CUPY, PYTHONPATH=path) == outline(
        """
        h2d 64 async cupy.asarray
        d2h 64 cupy.ndarray.get
        d2d 64 async cupy.array
        h2d 64 async cupy.ndarray.set
        h2d 64 async pinned cupy.ndarray.set
        h2d 16 cupy.asarray
        p2p 64 async cupy.copyto
        d2h 64 async cupy.ndarray.get
        d2h 64 cupy.ndarray.tolist
        h2d 8 async cupy.asarray
        d2h 8 cupy.ndarray.__float__
        h2d 64 cupy.memcpy
        d2h 32 async cupy.memcpyAsync
        p2p 64 cupy.memcpyPeer
        """
    )


def test_the_real_cupy_has_what_is_replaced_and_gets_it_back() -> None:
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("cupy is not installed")
    program = """
        import cupy
        assert {"get", "set", "item", "tolist", "__float__"} <= set(vars(cupy.ndarray))
        watched = [cupy.asarray, cupy.array, cupy.copyto, cupy.cuda.runtime.memcpyAsync]
        assert all(hasattr(function, "__wrapped__") for function in watched)
        selection._families["copies"].hits[0] = 1
    """
    assert run("cupy", program) == ""


JAX = """
    import jax, numpy
    import jax.numpy as jnp
    from instrument.instrumentors import array_copies as room
    {hosts}
    one, two = jax.devices()
    x = numpy.arange(8.0, dtype=numpy.float32)
    there = jax.device_put(x, one)
    other = jax.device_put(there, two)
    both = jax.device_put({{"a": x, "b": [x[:4]]}}, two)
    assert jax.device_put(there) is there
    jnp.asarray([1.0, 2.0])
    jax.jit(lambda v: jax.device_put(v) * 2)(there)
    mesh = jax.sharding.Mesh(jax.devices(), ("d",))
    spread = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d")))
    assert jax.device_get(spread).tolist() == x.tolist()
    assert numpy.asarray(spread).tolist() == x.tolist()  # fetched before
    assert jax.device_get(there).tolist() == x.tolist()  # the host's own memory
"""

TWO_DEVICES = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        # The processor's devices stand for accelerators, which they differ from only in where their memory is.
        (
            "room.JAX_HOST_PLATFORMS = frozenset()",
            """
            h2d 32 async jax.device_put
            p2p 32 async jax.device_put
            h2d 48 async jax.device_put
            h2d 32 async jax.device_put
            d2h 32 jax.ArrayImpl._value
            """,
        ),
        (
            "",
            """
            h2h 32 async jax.device_put
            h2h 32 async jax.device_put
            h2h 48 async jax.device_put
            h2h 32 async jax.device_put
            h2h 32 jax.ArrayImpl._value
            """,
        ),
    ],
)
def test_jax_copies_by_device_put_and_by_reading_values(hosts: str, expected: str) -> None:
    need("jax", "numpy")
    assert run("jax", JAX.format(hosts=hosts), **TWO_DEVICES) == outline(expected)


ONNXRUNTIME = """
    import numpy
    import onnxruntime
    from onnxruntime import OrtValue

    # y = Identity(x), made by onnx.helper
    MODEL = (
        "08083a390a100a017812017922084964656e746974791201675a100a0178120b0a09080112050a0312016e"
        "62100a0179120b0a09080112050a0312016e42040a00100d"
    )
    x = numpy.arange(4, dtype=numpy.float32)
    value = OrtValue.ortvalue_from_numpy(x)           # lies on the array
    assert value.numpy().tolist() == x.tolist()       # so does this
    value.update_inplace(x + 1)
    session = onnxruntime.InferenceSession(bytes.fromhex(MODEL), providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    binding.bind_cpu_input("x", x)                    # lies on the array
    binding.bind_output("y")
    session.run_with_iobinding(binding)
    assert binding.copy_outputs_to_cpu()[0].tolist() == x.tolist()

    class OnCuda(OrtValue):
        def device_name(self):
            return "cuda"

        def __dlpack_device__(self):
            return (2, 0)

    there = OnCuda.ortvalue_from_numpy(x)
    there.numpy()
    there.update_inplace(x)
    there.update_inplace(OnCuda.ortvalue_from_numpy(x[:4]))
    value.update_inplace(there)
"""


def test_onnxruntime_copies_by_its_values_and_bindings() -> None:
    need("onnxruntime", "numpy")
    assert run("onnxruntime", ONNXRUNTIME) == outline(
        """
        h2h 16 onnxruntime.OrtValue.update_inplace
        h2h 16 onnxruntime.IOBinding.copy_outputs_to_cpu
        h2d 16 onnxruntime.OrtValue.ortvalue_from_numpy
        d2h 16 onnxruntime.OrtValue.numpy
        h2d 16 onnxruntime.OrtValue.update_inplace
        h2d 16 onnxruntime.OrtValue.ortvalue_from_numpy
        d2d 16 onnxruntime.OrtValue.update_inplace
        d2h 16 onnxruntime.OrtValue.update_inplace
        """
    )
