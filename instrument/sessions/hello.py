"""The hello that each process of `instrument run` says as its session begins, and the one who listens for it.

`instrument run` becomes the service. Should something on the way keep our autostart from an interpreter (another
`sitecustomize`, a PYTHONPATH that is made anew, `python -I`), nobody of ours would be left there to say so. So a small
process beside the service, a copy of this file run by itself, listens for some seconds and says it in one line.
It imports nothing of ours, and the service's parent is not its parent: who waits for children meets none of ours.
"""

from __future__ import annotations

import _socket
import os
import select
import sys
import time

WAIT_S = 10.0

_MESSAGE_BYTES = 8_192


def _address(run_pid: int | str) -> str:
    return f"\0instrument-run-{run_pid}"


def say() -> None:
    """Tell whoever listens that a session begins here. A process of no run, or of a long one, says nothing."""
    run_pid = os.environ.get("INSTRUMENT_RUN_PID")
    if not run_pid:
        return
    try:
        speaker = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM)
        try:
            speaker.setblocking(False)
            speaker.sendto(b"%d %b" % (os.getpid(), _image(os.getpid()) or b""), _address(run_pid))
        finally:
            speaker.close()
    except OSError:
        pass  # nobody listens any more


def listen(run_pid: int) -> None:
    """Have a process listen that outlives this one, which is about to become the service. Some 20 ms."""
    import subprocess

    listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM)
    try:
        listener.bind(_address(run_pid))
        words = [sys.executable, "-I", "-S", __file__, str(run_pid), str(listener.fileno())]
        null = subprocess.DEVNULL
        subprocess.run(words, stdin=null, stdout=null, pass_fds=[listener.fileno()], check=False)  # noqa: S603 - this file
    except OSError:
        pass  # no room for another process, or its name is taken: the service runs all the same
    finally:
        listener.close()


def _image(pid: int) -> bytes | None:
    """What tells the program that a process runs from the one that it runs after an exec; None where it has gone."""
    try:
        with open(f"/proc/{pid}/auxv", "rb") as file:  # noqa: PTH123 - pathlib is slow to import
            return file.read(_MESSAGE_BYTES // 2)
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError:
        return b""  # of another user


# -------------------------------------------------------------------- the process that listens


def wait(run_pid: int, listener: _socket.socket, wait_s: float = WAIT_S) -> str:
    """Wait for a hello of a process that is still what it was then; after that time, why there is none.

    "" where there is one, or the service has ended.
    """
    said: dict[int, bytes] = {}
    poll = select.poll()
    poll.register(listener.fileno(), select.POLLIN)
    exit_fd = _exit_of(run_pid)
    if exit_fd is not None:
        poll.register(exit_fd, select.POLLIN)
    end_s = time.monotonic() + wait_s
    while (left_s := end_s - time.monotonic()) > 0:
        ready = [fd for fd, _ in poll.poll(1000 * (left_s if exit_fd is not None else min(left_s, 0.05)))]
        if listener.fileno() in ready:
            pid, _, image = listener.recv(_MESSAGE_BYTES).partition(b" ")
            said[int(pid)] = image
        elif ready or _has_ended(run_pid):
            return ""
    if any(_image(pid) in (image, b"") for pid, image in said.items()) or _has_ended(run_pid):
        return ""
    return (
        f"instrument: {wait_s:g} s after its start no process of this run records anything"
        f"{_obstacle(run_pid)}. Give `instrument run ...` to that program as the command that it is to run, "
        "or call instrument.start() in the service\n"
    )


def _exit_of(pid: int) -> int | None:
    """A descriptor that can be read once the process has ended; None where there are none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _has_ended(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - as above
            return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False


def _obstacle(pid: int) -> str:
    """What keeps our autostart from the program that the process runs now, as far as its environment tells."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123 - as above
            found = dict(line.partition(b"=")[::2] for line in file.read().split(b"\0"))
    except OSError:
        return ""
    own = os.path.join(os.path.dirname(os.path.abspath(__file__)), "autostart")  # noqa: PTH100, PTH118, PTH120 - as above
    for folder in os.fsdecode(found.get(b"PYTHONPATH", b"")).split(os.pathsep):
        if folder == own:
            return ": something on the way keeps our sitecustomize from being loaded"
        other = os.path.join(folder, "sitecustomize.py")  # noqa: PTH118 - as above
        if folder and os.path.exists(other):  # noqa: PTH110 - as above
            return f": {other} runs in place of ours"
    return ": something on the way has taken our folder off PYTHONPATH"


def _main() -> None:
    run_pid, descriptor = int(sys.argv[1]), int(sys.argv[2])
    if os.fork():
        os._exit(0)  # whoever started us goes on; we are nobody's child now
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, 1 << 16)
    message = wait(run_pid, _socket.socket(fileno=descriptor))
    if message:
        os.write(2, message.encode())


if __name__ == "__main__":
    _main()
