"""The program of an agent's process: `launch` runs this file by itself.

The package is put in place without what its `__init__` imports, which is what records: an agent has no use for it, and
is there in a tenth of the time with half of the memory.
"""

import json
import os
import sys
import types


def _main() -> None:
    settings = json.loads(sys.argv[1])
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 - pathlib is slow to import
    sys.path[:] = settings["path"]
    package = types.ModuleType("instrument")
    package.__path__ = [root]
    sys.modules["instrument"] = package
    from instrument.agent import service

    service.serve(3, settings["run"], settings["first"], says=settings["says"])


if __name__ == "__main__":
    _main()
