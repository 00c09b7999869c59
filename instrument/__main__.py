"""The `instrument` command, for calls as `python -m instrument`."""

import sys

from instrument.runtime import shadowing

shadowing.guard_imports()  # before anything else is imported

from importlib.util import find_spec
from pathlib import Path

from instrument import native


def prefer_installed_package() -> None:
    """Import the installed package instead of a source tree, which lacks the compiled recorder."""
    if native.MODULE is not None:
        return
    file, entries = Path(__file__), sys.path[:]
    modules = {name: sys.modules[name] for name in [*sys.modules] if name.partition(".")[0] == "instrument"}
    for name in modules:
        del sys.modules[name]
    sys.path[:] = [entry for entry in entries if Path(entry).resolve() != file.resolve().parent.parent]
    spec = find_spec("instrument")
    if spec is None or Path(spec.origin or file).resolve().parent == file.resolve().parent:
        sys.modules.update(modules)
    else:
        import instrument.cli  # noqa: F401
    sys.path[:] = entries


if __name__ == "__main__":
    prefer_installed_package()
    from instrument.cli import main

    sys.exit(main())
