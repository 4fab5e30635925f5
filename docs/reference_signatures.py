"""Writes the signatures of docs/reference.md from the code: python docs/reference_signatures.py.

An entry is a line `::: pallas_softmax.NAME`, which the site replaces by the docstring, and indented options below it.
This program hides that line in a comment, and writes what a reader of the file needs around it: a heading, the
signature, and the docstring's first paragraph. It also writes the table of contents.
"""

import ast
import functools
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import pallas_softmax  # noqa: E402

REFERENCE = ROOT / "docs" / "reference.md"

# an entry as this program writes it, or as a person adds it: the name and the options are its groups
ENTRY = re.compile(
    r"(?:^### `[\w.]+`\n\n)?^(?:<!-- )?::: pallas_softmax\.(\w+)\n((?:    .*\n)*)"
    r"(?:-->\n)?(?:\n```py\n(?:.*\n)*?```\n)?(?:\n\*(?!\*)(?:.+\n)+)?",
    re.MULTILINE,
)
SECTION = re.compile(r"^## (.*)$", re.MULTILINE)
_CONTENTS = re.compile(r"(?<=<!-- contents -->\n\n)(?:\|.*\n)*")
_LETTERS = 100  # of a signature on one line


def written(text: str) -> str:
    """Returns the reference with its signatures and its table of contents as the code has them."""
    text = ENTRY.sub(lambda entry: _entry(*entry.groups()), text)
    return _CONTENTS.sub(lambda _: _contents(text), text)


def for_the_site(text: str) -> str:
    """Returns the reference with the lines that the site replaces, without what is written around them."""

    def shown(entry: re.Match) -> str:
        name, options = entry.groups()
        source = _source(_value(name))
        return f"::: pallas_softmax.{name}\n{options}" + f"\n{source}\n" * bool(source)

    return ENTRY.sub(shown, text)


def anchor(heading: str) -> str:
    """Returns the anchor of a heading, on GitHub and on the site."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def sections(text: str) -> Iterator[tuple[str, str]]:
    """Yields the heading and the text of each section."""
    _, *parts = SECTION.split(text)
    return zip(parts[::2], parts[1::2])


def _contents(text: str) -> str:
    lines = ["| section | names |", "|---|---|"]
    for heading, section in sections(text):
        names = ", ".join(f"`{name}`" for name, _ in ENTRY.findall(section))
        lines.append(f"| [{heading}](#{anchor(heading)}) | {names} |")
    return "\n".join(lines) + "\n"


def _entry(name: str, options: str) -> str:
    value = _value(name)
    members = re.findall(r"\w+", (re.findall(r"members: \[(.*)\]", options) or [""])[0])
    if isinstance(value, ModuleType):
        found = [signature(getattr(value, member), member) for member in members]
    else:
        found = [signature(value, name)]
    lines = [f"### `{name}`", "", f"<!-- ::: pallas_softmax.{name}", *options.splitlines(), "-->", ""]
    if any(found):
        lines += ["```py", *filter(None, found), "```", ""]
    if first := _first_paragraph(value):
        lines += [*textwrap.wrap(f"*{first}* {_source(value)}", 120, break_on_hyphens=False), ""]
    return "\n".join(lines)


def _value(name: str) -> Any:
    """Returns what a name of the package means; `paper` is a module that the package does not import."""
    return getattr(pallas_softmax, name, None) or importlib.import_module(f"pallas_softmax.{name}")


def _is_documented(value: Any) -> bool:
    return inspect.isfunction(value) or inspect.isclass(value) or inspect.ismodule(value)


def _source(value: Any) -> str:
    """Returns a link to the source of a function, a class or a module."""
    if not _is_documented(value):
        return ""
    path = Path(str(inspect.getsourcefile(inspect.unwrap(value)))).resolve().relative_to(ROOT)
    return f"[Source](../{path.as_posix()})"


def _first_paragraph(value: Any) -> str:
    """Returns the first paragraph of the docstring of a function, a class or a module."""
    if not _is_documented(value):
        return ""
    return " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())


def signature(value: Any, name: str) -> str:
    """Returns the signature of a function, the fields of a class, or the value of a type, as the code has them."""
    if inspect.isfunction(value):
        (node,) = _parsed(inspect.unwrap(value)).body
        assert isinstance(node, ast.FunctionDef)
        _show_integers(node.args, inspect.signature(value))
        returns = f" -> {_text(node.returns)}" if node.returns else ""
        return _call(name, _arguments(node.args), returns)
    if inspect.isclass(value):
        (node,) = _parsed(value).body
        assert isinstance(node, ast.ClassDef)
        fields = [
            _text(line)
            for line in node.body
            if isinstance(line, ast.AnnAssign) and not isinstance(line.value, ast.Call)
        ]
        return _call(name, fields, "")
    return f"{name} = {_assigned(name)}"


def _show_integers(arguments: ast.arguments, actual: inspect.Signature) -> None:
    """Replaces the name of a constant, which is private, by its value: WORKSPACE_BYTES by 512 * 2**20."""
    pairs = [
        *zip((arguments.posonlyargs + arguments.args)[::-1], arguments.defaults[::-1]),
        *zip(arguments.kwonlyargs, arguments.kw_defaults),
    ]
    for argument, default in pairs:
        value = actual.parameters[argument.arg].default
        if isinstance(default, ast.Name | ast.Attribute) and isinstance(value, int):
            text = f"{value // 2**20} * 2**20" if value % 2**20 == 0 else repr(value)
            lists = (arguments.defaults, arguments.kw_defaults)
            (held,) = [found for found in lists if any(each is default for each in found)]
            held[[each is default for each in held].index(True)] = ast.parse(text, mode="eval").body


def _parsed(value: Any) -> ast.Module:
    return ast.parse(textwrap.dedent(inspect.getsource(value)))


def _arguments(arguments: ast.arguments) -> list[str]:
    """Returns each argument with its type and default, and the marks / and *."""
    lists = [arguments.posonlyargs, arguments.args, arguments.kwonlyargs]
    positional = lists[0] + lists[1]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    found = [_argument(*pair) for pair in zip(positional, defaults)]
    if lists[0]:
        found.insert(len(lists[0]), "/")
    if arguments.vararg:
        found.append(f"*{_argument(arguments.vararg, None)}")
    elif lists[2]:
        found.append("*")
    found += [_argument(*pair) for pair in zip(lists[2], arguments.kw_defaults)]
    return found + ([f"**{_argument(arguments.kwarg, None)}"] if arguments.kwarg else [])


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    kind = ": " + _text(argument.annotation).strip('"') if argument.annotation else ""
    return f"{argument.arg}{kind}" + (f" = {_text(default)}" if default else "")


def _text(node: ast.AST) -> str:
    """Returns the code of a node, with the double quotes of this repository."""
    return ast.unparse(node).replace("'", '"')


def _call(name: str, arguments: list[str], returns: str) -> str:
    """Returns a call on one line, or with one argument on a line."""
    line = f"{name}({', '.join(arguments)}){returns}"
    if len(line) <= _LETTERS:
        return line
    return "\n".join([f"{name}(", *(f"    {argument}," for argument in arguments), f"){returns}"])


@functools.cache
def _exports() -> dict[str, str]:
    """Returns the module of each name that the package imports."""
    tree = ast.parse(inspect.getsource(pallas_softmax))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: str(node.module) for node in imports for alias in node.names}


def _assigned(name: str) -> str:
    """Returns the expression that a module of the package assigns to a name."""
    path = ROOT / (_exports()[name].replace(".", "/") + ".py")
    for node in ast.parse(path.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return _text(node.value)  # pyright: ignore[reportAttributeAccessIssue]
    raise LookupError(name)


if __name__ == "__main__":
    REFERENCE.write_text(written(REFERENCE.read_text()))
