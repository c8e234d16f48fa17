"""No code looks for data in the message of an error: errors have fields, and foreign ones classes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("weightserver", "trainer", "deploy")
FOREIGN = {
    "weightserver/client/retries.py": "gRPC's text is quoted to people, and a shard's own becomes the error's",
    "weightserver/operations/health.py": "gRPC's text is quoted to people",
    "trainer/distributed.py": "gloo raises RuntimeError, whatever happened",
    "trainer/ray_tasks.py": "Ray raises RuntimeError for what a worker cannot import, in a text of pages",
    "trainer/stopping.py": "torch's text about memory is quoted to people, up to its second sentence",
    "trainer/export/weights_file.py": "torch's unpickler names the class that it refuses in its text alone",
}
"""Files that read the text of another library's error, and why."""
_SEARCHES = {"search", "match", "fullmatch", "findall", "finditer", "startswith", "endswith", "removeprefix"}
_SEARCHES |= {"removesuffix", "partition", "rpartition", "find", "rfind", "index", "count", "replace", "sub"}


def parsed(tree: ast.AST) -> Iterator[int]:
    """Lines in which the text of an exception, or a part of it, is searched, compared or taken from gRPC."""
    caught = {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.name}
    variables = set[str]()

    def is_text(node: ast.AST) -> bool:
        match node:
            case ast.Name(name):
                return name in variables
            case (
                ast.Call(ast.Name("str" | "repr"), [ast.Name(name)])
                | ast.Attribute(ast.Name(name), "args")
                | ast.FormattedValue(ast.Name(name))
            ):
                return name in caught
            case ast.JoinedStr(parts):
                return any(map(is_text, parts))
            case ast.Subscript(whole) | ast.Call(ast.Attribute(whole)):
                return is_text(whole)
        return False

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and is_text(node.value):
            variables |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left, _, others) if any(map(is_text, [left, *others])):
                yield node.lineno
            case ast.Call(ast.Attribute(_, "details")):
                yield node.lineno
            case ast.Call(ast.Attribute(whole, name), arguments):
                cuts = name == "split" and arguments  # without, it joins lines
                if (name in _SEARCHES or cuts) and any(map(is_text, [whole, *arguments])):
                    yield node.lineno


def test_no_message_is_parsed() -> None:
    found = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if any(parsed(ast.parse(path.read_text())))
    }
    assert found == FOREIGN.keys()
