"""The source of a service, read and not run: its imports, apps, routes, functions, classes and layers."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path

from instrument.proposal.own_modules import source_files
from instrument.proposal.packages import PACKAGES

APPS = ("FastAPI", "Starlette", "Litestar", "Flask", "Quart")
"""What makes an application that a server of ASGI or WSGI serves."""

_VERBS = ("get", "post", "put", "patch", "delete", "route", "websocket", "api_route")
_TRANSPARENT = ("staticmethod", "classmethod", "no_grad", "inference_mode", "wraps", "contextmanager", "override")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class SourceFunction:
    """A function or method that a module defines whenever it is imported. `annotations` are those of its parameters,
    `parts` the attributes and keys of them that its body reads."""

    module: str
    qualname: str
    place: str
    parameters: tuple[str, ...]
    annotations: tuple[tuple[str, str], ...]
    parts: tuple[tuple[str, str], ...]
    owner_bases: tuple[str, ...]
    suspends: bool
    statements: int


@dataclass(slots=True)
class SourceModule:
    """What one file says. `missing` are packages that it imports and that are not installed; `runs` says that its body
    serves or computes when it is imported, `is_script` that it is made to be run."""

    name: str
    path: Path
    imports: set[str] = field(default_factory=set)
    own_imports: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    functions: list[SourceFunction] = field(default_factory=list)
    layers: list[tuple[str, str]] = field(default_factory=list)
    fields: dict[str, list[str]] = field(default_factory=dict)
    apps: list[str] = field(default_factory=list)
    routes: list[str] = field(default_factory=list)
    is_script: bool = False
    runs: bool = False
    trains: bool = False


def read_source(root: Path) -> list[SourceModule]:
    """The service's own modules below a folder, and below its `src`."""
    found: dict[str, SourceModule] = {}
    roots = [root, *([root / "src"] if (root / "src").is_dir() and not (root / "src/__init__.py").exists() else [])]
    for one in roots:
        for name, path in source_files(one):
            if one == root and len(roots) > 1 and name.split(".")[0] == "src":
                continue
            module = _module(name, path, root)
            if module is not None and name not in found:
                found[name] = module
    own = set(found)
    importable = [str(root), *sys.path]
    for module in found.values():
        tops = {name.partition(".")[0] for name in module.imports} - {name.partition(".")[0] for name in own}
        module.missing = {name for name in tops if name not in sys.stdlib_module_names and not _is_there(name)}
        module.own_imports = {name for name in own if name in module.imports and name != module.name}
        if PathFinder.find_spec(module.name.partition(".")[0], importable) is None:
            module.missing.add(module.name.partition(".")[0])
    _spread_missing(found)
    return [found[name] for name in sorted(found)]


def _spread_missing(found: dict[str, SourceModule]) -> None:
    """What a module of ours cannot import, those cannot that import it."""
    changed = True
    while changed:
        changed = False
        for module in found.values():
            below = set().union(*(found[name].missing for name in module.own_imports)) - module.missing
            parents = module.name.split(".")[:-1]
            for depth in range(1, len(parents) + 1):
                package = found.get(".".join(parents[:depth]))
                below |= set() if package is None else package.missing - module.missing
            if below:
                module.missing |= below
                changed = True


def _is_there(name: str) -> bool:
    return name in sys.modules or PathFinder.find_spec(name) is not None or name in sys.builtin_module_names


def known_packages(modules: Iterable[SourceModule]) -> set[str]:
    """The packages among `PACKAGES` that the modules import."""
    imported = {name for module in modules for name in module.imports}
    return {
        package.name
        for package in PACKAGES
        if any(name == package.name or name.startswith(f"{package.name}.") for name in imported)
    }


def _module(name: str, path: Path, root: Path) -> SourceModule | None:
    try:
        text = path.read_text("utf-8")
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    module = SourceModule(name, path, trains=".backward(" in text)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    place = path.relative_to(root).as_posix()
    _read_routes(module, tree)
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            base = _absolute(statement, package)
            names = [base, *(f"{base}.{alias.name}" for alias in statement.names)]
        else:
            continue
        if statement in tree.body:
            module.imports.update(names)
    for statement in tree.body:
        if isinstance(statement, Function):
            _add_function(module, statement, "", (), place)
        elif isinstance(statement, ast.ClassDef):
            _read_class(module, statement, place)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            _read_app(module, statement)
        elif isinstance(statement, ast.If) and "__main__" in ast.dump(statement.test):
            module.is_script = True
        elif isinstance(statement, (ast.Expr, ast.For, ast.While, ast.With)) and _calls_something(statement):
            module.is_script = module.runs = True
    return module


def _absolute(statement: ast.ImportFrom, package: str) -> str:
    if not statement.level:
        return statement.module or ""
    parts = package.split(".")
    above = parts[: len(parts) - statement.level + 1]
    return ".".join([*above, *([statement.module] if statement.module else [])])


def _calls_something(statement: ast.stmt) -> bool:
    """Whether a statement of a module's body runs something: not a docstring, nor a call such as `app.include(...)`."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Call):
            name = _last_name(node.func)
            if not isinstance(statement, ast.Expr) or name in (
                "run",
                "main",
                "serve",
                "start",
                "run_app",
                "serve_forever",
            ):
                return True
    return False


def _read_class(module: SourceModule, definition: ast.ClassDef, place: str) -> None:
    bases = tuple(_last_name(base) for base in definition.bases)
    fields = [
        statement.target.id
        for statement in definition.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    ]
    for statement in definition.body:
        if isinstance(statement, Function):
            _add_function(module, statement, f"{definition.name}.", bases, place)
            if statement.name == "__init__":
                fields += [
                    node.attr
                    for node in ast.walk(statement)
                    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value)
                ]
    module.fields[definition.name] = list(dict.fromkeys(fields))
    has_forward = any(isinstance(one, Function) and one.name == "forward" for one in definition.body)
    if has_forward and any(base.endswith("Module") for base in bases):
        module.layers.append((definition.name, f"{place}:{definition.lineno}"))


def _add_function(module: SourceModule, definition: Function, owner: str, bases: tuple[str, ...], place: str) -> None:
    """Note a function, unless a decorator nobody here knows may have made something else of it."""
    names = [_last_name(one.func if isinstance(one, ast.Call) else one) for one in definition.decorator_list]
    if any(name not in _TRANSPARENT for name in names):
        return
    arguments = [*definition.args.posonlyargs, *definition.args.args, *definition.args.kwonlyargs]
    annotations = tuple((one.arg, ast.unparse(one.annotation)) for one in arguments if one.annotation is not None)
    body = [one for one in definition.body if not _is_docstring(one)]
    is_generator = any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in ast.walk(definition))
    module.functions.append(
        SourceFunction(
            module.name,
            f"{owner}{definition.name}",
            f"{place}:{definition.lineno}",
            tuple(one.arg for one in arguments),
            annotations,
            tuple(dict.fromkeys(_parts_read(definition, {one.arg for one in arguments}))),
            bases,
            isinstance(definition, ast.AsyncFunctionDef) or is_generator,
            sum(isinstance(node, ast.stmt) for one in body for node in ast.walk(one)),
        )
    )


def _parts_read(definition: Function, names: set[str]) -> Iterator[tuple[str, str]]:
    """Attributes and keys of parameters that a body reads: `request.request_id`, `body["request_id"]`."""
    for node in ast.walk(definition):
        if isinstance(node, ast.Attribute):
            part: object = node.attr
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            part = node.slice.value
        else:
            continue
        if isinstance(part, str) and isinstance(node.value, ast.Name) and node.value.id in names - {"self"}:
            yield node.value.id, part


def _read_app(module: SourceModule, statement: ast.Assign | ast.AnnAssign) -> None:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    value = statement.value
    if isinstance(value, ast.Call) and _last_name(value.func) in APPS:
        module.apps += [target.id for target in targets if isinstance(target, ast.Name)]


def _read_routes(module: SourceModule, tree: ast.Module) -> None:
    """Routes that decorators such as `@app.post("/generate")` name, wherever the function is."""
    for node in _functions(tree):
        for decorator in node.decorator_list:
            if not isinstance(decorator, ast.Call) or not isinstance(decorator.func, ast.Attribute):
                continue
            verb = decorator.func.attr
            path = decorator.args[0] if decorator.args else None
            if verb in _VERBS and isinstance(path, ast.Constant) and isinstance(path.value, str):
                method = verb.upper() if verb in _VERBS[:5] else "any"
                module.routes.append(f"{method} {path.value}")


def _functions(tree: ast.AST) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


def _last_name(expression: ast.expr) -> str:
    if isinstance(expression, ast.Subscript):
        return _last_name(expression.value)
    return getattr(expression, "attr", None) or getattr(expression, "id", None) or ""


def _is_self(expression: ast.expr) -> bool:
    return isinstance(expression, ast.Name) and expression.id == "self"


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
