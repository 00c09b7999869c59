"""The script of the agent's process. `instrument.runtime.agent_socket` starts it."""

import json
import os
import sys
from types import ModuleType
from typing import Any


class _LateInspect(ModuleType):
    """A substitute for the module `inspect`, which takes 1 MB. The real module is imported at the first access."""

    def __getattr__(self, name: str) -> Any:
        import inspect

        return getattr(inspect, name)


sys.modules["inspect"] = _LateInspect("inspect")
import dataclasses  # noqa: E402, F401 - with the substitute

del sys.modules["inspect"]


def _main() -> None:
    settings = json.loads(sys.argv[1])
    os.closerange(4, min(1 << 16, os.sysconf("SC_OPEN_MAX")))
    os.chdir("/")
    os.umask(0o077)
    if settings["is_apart"]:
        os.setsid()
        if os.fork():
            os._exit(0)
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 - pathlib is slow to import
    sys.path += [*settings["path"], os.path.dirname(root)]  # noqa: PTH120 - as above
    from instrument.agent import agent

    agent.serve(3, settings["run"], settings["first"], says=settings["says"])


if __name__ == "__main__":
    _main()
