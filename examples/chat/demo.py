"""The demonstration as one process tree: start a server, send it load, stop it, report the result.

`python -m chat.demo --requests 300 -- COMMAND` takes the command that starts the server, for instance with
`python -m instrument run --profile configs/chat.yaml -- -m chat.server --port 0`. Without a command it is the bare
server. The output of the server is passed on; the exit code is 0 only if every request was answered and the server
ended by itself after the signal.
"""

import argparse
import signal
import subprocess
import sys
import threading
from queue import Empty, Queue
from typing import IO

_START_S = 60
_STOP_S = 30
_LISTENING = "listening on "


def main() -> int:
    """Command line of the module."""
    own, command = _split(sys.argv[1:])
    parser = argparse.ArgumentParser(prog="python -m chat.demo", usage="%(prog)s [options] [-- COMMAND ...]")
    parser.add_argument("--requests", type=int, default=300, help="how many (default: 300)")
    parser.add_argument("--concurrency", type=int, default=32, help="how many at a time (default: 32)")
    parser.add_argument("--signal", choices=["SIGINT", "SIGTERM"], default="SIGINT", help="what stops the server")
    parser.add_argument("--save", metavar="FILE", help="write the answers")
    parser.add_argument("--check", metavar="FILE", help="compare the answers with saved ones, byte for byte")
    options = parser.parse_args(own)
    load = ["--requests", str(options.requests), "--concurrency", str(options.concurrency)]
    load += ["--save", options.save] if options.save else []
    load += ["--check", options.check] if options.check else []
    command = command or [sys.executable, "-m", "chat.server", "--port", "0"]
    return run_demo(command, load, signal.Signals[options.signal])


def run_demo(command: list[str], load: list[str], stop: signal.Signals) -> int:
    """Run the server of `command` and the load generator with the options `load`; 0 if both ended well."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        found: Queue[str] = Queue()
        reader = threading.Thread(target=_pass_on, args=(server.stdout, found), daemon=True)
        reader.start()
        try:
            loaded = _load(_await_url(found), load)
        finally:
            ended = _stop(server, stop)
            reader.join(_STOP_S)
    print(f"demo: load generator exit code {loaded}, server exit code {ended}", file=sys.stderr)
    # uvicorn repeats a SIGTERM after its shutdown, so that the process ends by it
    return 0 if loaded == 0 and ended in (0, -stop) else 1


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _pass_on(lines: IO[str], found: Queue[str]) -> None:
    for line in lines:
        print(line, end="", flush=True)
        if line.startswith(_LISTENING):
            found.put(line.removeprefix(_LISTENING).strip())
    found.put("")


def _await_url(found: Queue[str]) -> str:
    try:
        return found.get(timeout=_START_S)
    except Empty:
        return ""


def _load(url: str, options: list[str]) -> int:
    if not url:
        print(f"demo: the server ended, or did not listen within {_START_S} s", file=sys.stderr)
        return 1
    return subprocess.run([sys.executable, "-m", "chat.load", "--url", url, *options], check=False).returncode


def _stop(server: subprocess.Popen[str], stop: signal.Signals) -> int:
    server.send_signal(stop)
    try:
        return server.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        print(f"demo: the server did not end within {_STOP_S} s and was killed", file=sys.stderr)
        server.kill()
        return server.wait()


if __name__ == "__main__":
    sys.exit(main())
