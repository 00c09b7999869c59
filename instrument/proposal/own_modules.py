"""Which modules are a service's own: those beside it, and not what is installed."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from instrument.instrumentors.requests.packages import PACKAGES

_PASSED_OVER = re.compile(
    r"\..*|__pycache__|__main__|tests?|testing|docs?|build|dist|node_modules|site-packages|.*\.egg-info|setup|conftest"
    r"|noxfile|test_.*|.*_test|instrument|migrations|venv|env"
)
"""Names of files and folders that have no code of a service."""

_INSTALLED = {"site-packages", "dist-packages"}

_SERVERS = {package.name.partition(".")[0] for package in PACKAGES}


def roots_of(words: Sequence[str], folder: Path) -> list[Path]:
    """The folders in which the modules of a command lie: the current one, its script's, and those of `PYTHONPATH`."""
    found = [folder]
    if words and not words[0].startswith("-"):
        script = (folder / words[0]).resolve()
        if script.is_dir() or script.suffix == ".py":
            found.append(script if script.is_dir() else script.parent)
    found += [folder / entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    found += [root / "src" for root in found if (root / "src").is_dir() and not (root / "src/__init__.py").exists()]
    own = [root.resolve() for root in found if root.is_dir() and not _is_installed(root.resolve())]
    return list(dict.fromkeys(own))


def own_names(words: Sequence[str], folder: Path) -> list[str]:
    """The top-level names of a command's own modules: those below `roots_of`, and installed ones that it names."""
    roots = roots_of(words, folder)
    names = {name for root in roots for name in _top_level(root)}
    paths = [*map(str, roots), *sys.path]
    named = [word for before, word in zip(("", *words), words, strict=False) if before == "-m" or ":" in word]
    for word in named:
        found = re.match(r"([A-Za-z_]\w*)(?:\.\w+)*(?::|$)", word)
        name = found[1] if found else ""
        if name and name not in _SERVERS and name not in sys.stdlib_module_names and PathFinder.find_spec(name, paths):
            names.add(name)
    return sorted(names)


def patterns_of(names: Iterable[str]) -> list[str]:
    """The patterns of rules that find every function of these modules, and of the program itself."""
    return [pattern for name in names for pattern in (f"{name}:**", f"{name}.**:**")] + ["__main__:**"]


def _top_level(root: Path) -> list[str]:
    """The modules and packages that lie in a folder."""
    found = set()
    with os.scandir(root) as entries:
        for entry in entries:
            name = entry.name.removesuffix(".py")
            if not name.isidentifier() or _PASSED_OVER.fullmatch(name) or name in sys.stdlib_module_names:
                continue
            is_module = entry.is_file() and entry.name.endswith(".py")
            if is_module or (entry.is_dir() and not Path(entry, "pyvenv.cfg").exists() and _has_modules(Path(entry))):
                found.add(name)
    return sorted(found)


def _has_modules(folder: Path) -> bool:
    if (folder / "__init__.py").exists():
        return True
    return any(folder.glob("*.py")) or any(folder.glob("*/*.py"))


def _is_installed(folder: Path) -> bool:
    inside = folder.is_relative_to(Path(sys.prefix, "lib").resolve()) or folder == Path(sys.prefix, "bin").resolve()
    return inside or not _INSTALLED.isdisjoint(folder.parts)
