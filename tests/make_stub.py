"""Write quanterr/__init__.pyi: the public names with their types, and functions with all of their keywords.

python tests/make_stub.py        tests/options/test_keywords.py checks the file against it
"""

import ast
import builtins
import inspect
import subprocess
import sys
from functools import cache
from importlib import import_module
from keyword import iskeyword
from pathlib import Path
from typing import Any

import quanterr
from quanterr import options
from quanterr.options import keywords

STUB = Path(quanterr.__file__).with_suffix(".pyi")
HEAD = '"""Types of the public names, made by tests/make_stub.py."""\n'


def make_stub() -> str:
    """Return the text of the stub."""
    imports, functions = {"from quanterr.version import __version__ as __version__"}, []
    for name, home in quanterr._HOMES.items():
        if inspect.isfunction(function := getattr(quanterr, name)) and hasattr(function, "options"):
            functions.append(write_function(function, imports))
        else:
            imports.add(f"from {home} import {name} as {name}")
    imports = {line for line in imports if f"{line} as {line.split()[-1]}" not in imports}
    exported = f"__all__ = {quanterr.__all__!r}"
    return _format("\n\n".join([HEAD, "\n".join(sorted(imports)), exported, *functions]))


def write_function(function: Any, imports: set[str]) -> str:
    """Return a function as source, with the annotations as they are written, and add what they need to the imports."""
    name, module = function.__name__, function.__module__
    (node,) = (
        statement
        for statement in read(module).body
        if isinstance(statement, ast.FunctionDef) and statement.name == name
    )
    arguments = node.args
    arguments.kwarg = None
    annotations = {argument.arg: (argument.annotation, module) for argument in (*arguments.args, *arguments.kwonlyargs)}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in annotations:
            annotations[parameter.name] = find_annotation(parameter.name, function.options), options.__name__
            arguments.kwonlyargs.append(ast.arg(parameter.name, annotations[parameter.name][0]))
            arguments.kw_defaults.append(ast.Constant(parameter.default))
    for name, option in options.list_options(function.options).items():  # their long names are accepted, too
        if (other := keywords.long_name(name, option)) not in annotations and not iskeyword(other):
            annotations[other] = annotations[name]
            arguments.kwonlyargs.append(ast.arg(other, annotations[name][0]))
            arguments.kw_defaults.append(ast.Constant(inspect.signature(function).parameters[name].default))
    for annotation, place in [*annotations.values(), (node.returns, module)]:
        imports |= list_imports(annotation, place)
    docstring = inspect.getdoc(function)
    node.body, node.decorator_list = [ast.Expr(ast.Constant(docstring)), ast.Expr(ast.Constant(...))], []
    return ast.unparse(ast.fix_missing_locations(node))


def find_annotation(field: str, struct: type) -> ast.expr:
    """Return the annotation of a dataclass's field without its option."""
    bodies = {
        statement.name: statement.body
        for statement in read(options.__name__).body
        if isinstance(statement, ast.ClassDef)
    }
    annotation = next(
        line.annotation
        for base in struct.__mro__
        for line in bodies.get(base.__name__, [])
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.target.id == field
    )
    return annotation.slice.elts[0] if ast.unparse(annotation).startswith("Annotated[") else annotation


def list_imports(annotation: ast.AST, module: str) -> set[str]:
    """Return the imports that an annotation of a module needs."""
    imports = set()
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name) and not hasattr(builtins, node.id):
            imports.add(find_import(node.id, module))
    return imports


def find_import(name: str, module: str) -> str:
    """Return the import of a name that a module imports or defines."""
    for node in ast.walk(read(module)):
        if isinstance(node, ast.Import | ast.ImportFrom) and name in {
            alias.asname or alias.name for alias in node.names
        }:
            return f"import {name}" if isinstance(node, ast.Import) else f"from {node.module} import {name}"
    return f"from {module} import {name}"


@cache
def read(module: str) -> ast.Module:
    """Return the syntax tree of a module."""
    return ast.parse(Path(import_module(module).__file__).read_text("utf-8"))


def _format(text: str) -> str:
    """Return Python as ruff formats it, with its imports in order."""
    for command in (["check", "--select", "I", "--fix-only", "--quiet"], ["format", "--quiet"]):
        words = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(STUB), "-"]
        text = subprocess.run(words, input=text, stdout=subprocess.PIPE, check=True, text=True).stdout
    return text


if __name__ == "__main__":
    STUB.write_text(make_stub(), "utf-8")
