"""The process context: a profiler that knows a process by its number alone finds who it is, as OTEP 4719 has it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from instrument.runtime import process_context

resource_pb2 = pytest.importorskip("opentelemetry.proto.resource.v1.resource_pb2")
pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc")


def read(pid: int) -> dict[str, Any] | None:
    """Return the attributes that a profiler reads of a process, None if there are none."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, _, _, _, _, *name = line.split(maxsplit=5)
        named = name[0].removesuffix(" (deleted)") if name else ""
        if named not in ("/memfd:OTEL_CTX", "[anon_shmem:OTEL_CTX]", "[anon:OTEL_CTX]"):
            continue
        with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
            end = time.monotonic() + 60
            while time.monotonic() < end:
                header = os.pread(memory.fileno(), process_context.HEADER.size, int(span.split("-")[0], 16))
                signature, version, size, published_ns, address = process_context.HEADER.unpack(header)
                if published_ns == 0:
                    time.sleep(0.0001)
                    continue
                payload = os.pread(memory.fileno(), size, address)
                again = os.pread(memory.fileno(), len(header), int(span.split("-")[0], 16))
                if process_context.HEADER.unpack(again)[3] == published_ns:
                    break
            else:
                raise AssertionError("it changes for ever")
        assert (signature, version) == (b"OTEL_CTX", 2)
        return decoded(payload)
    return None


def contexts() -> list[str]:
    """The descriptors of this process that are of a context. Others come and go with what earlier tests have left."""
    targets = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            targets.append(str(path.readlink()))
    return [target for target in targets if "OTEL_CTX" in target]


def decoded(payload: bytes) -> dict[str, Any]:
    """The attributes of the resource in a ProcessContext, whose first field that is."""
    assert payload[:1] == b"\x0a"
    size, at, shift = 0, 1, 0
    while True:
        size |= (payload[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if payload[at - 1] < 0x80:
            break
    assert at + size == len(payload)
    found = resource_pb2.Resource.FromString(payload[at:])
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in found.attributes}


def begun(source: str, **more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(source)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **more}
    )


def test_a_service_its_version_and_its_children_are_found_from_outside() -> None:
    service = begun(
        """
        import json, os, sys
        import instrument
        from instrument.profile.keys import loads
        session = instrument.start(loads("service: chat"))
        def tell(more):
            print(json.dumps(more), flush=True)
            sys.stdin.readline()
        tell({"pid": os.getpid()})
        session.reload(loads("service: talk"))
        tell({"pid": os.getpid()})
        child = os.fork()
        if not child:
            tell({"pid": os.getpid()})
            os._exit(0)
        os.waitpid(child, 0)
        instrument.stop()
        tell({"pid": os.getpid()})
        """,
        OTEL_RESOURCE_ATTRIBUTES="service.version=1.2,deployment.environment.name=test%20bed",
    )
    with service:
        assert service.stdout is not None
        assert service.stdin is not None
        seen = []
        for _ in range(4):
            told = json.loads(service.stdout.readline())
            seen.append(read(told["pid"]))
            service.stdin.write("\n")
            service.stdin.flush()
    first, reloaded, child, stopped = seen
    assert first is not None
    assert reloaded is not None
    assert child is not None
    assert {name: first[name] for name in ("service.name", "service.version", "deployment.environment.name")} == {
        "service.name": "chat", "service.version": "1.2", "deployment.environment.name": "test bed",
    }  # fmt: skip
    assert first["process.pid"] == service.pid
    assert (first["service.instance.id"], reloaded["service.name"]) == (reloaded["service.instance.id"], "talk")
    assert child["process.pid"] != service.pid
    assert child["service.instance.id"] != first["service.instance.id"]
    assert stopped is None


def test_a_process_context_of_another_sdk_stays_untouched() -> None:
    service = begun(
        """
        import mmap, os, sys
        fd = os.memfd_create("OTEL_CTX")
        os.ftruncate(fd, 4096)
        theirs = mmap.mmap(fd, 4096)
        import instrument
        session = instrument.start()
        with open("/proc/self/maps") as maps:
            print(sum("OTEL_CTX" in line for line in maps))
        print([note for note in session.notes() if "context" in note])
        """
    )
    out, _ = service.communicate(timeout=240)
    assert out.splitlines() == ["1", "[]"]


def test_a_reader_never_sees_half_of_an_update() -> None:
    if process_context._is_context_published():
        pytest.skip("this process has one")
    from instrument.otlp.packing import pack_resource

    stopping, before = threading.Event(), contexts()

    def update() -> None:
        number = 0
        while not stopping.is_set():
            number += 1
            text = f"{number} " * (number % 50)
            assert not process_context.publish_context(pack_resource({"service.name": text, "copy": text}))
            time.sleep(0.0002)

    assert not process_context.publish_context(pack_resource({"service.name": "a", "copy": "a"}))
    thread = threading.Thread(target=update)
    thread.start()
    try:
        for _ in range(300):
            found = read(os.getpid())
            assert found is not None
            assert found.get("service.name") == found.get("copy")
    finally:
        stopping.set()
        thread.join()
        process_context.withdraw_context()
    assert read(os.getpid()) is None
    assert contexts() == before
    assert process_context.publish_context(bytes(process_context.PAYLOAD_LIMIT + 1))
