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
    "trainer/export/weights_file.py": "torch's unpickler names the class that it refuses in its text alone",
}
"""Files that read the text of another library's error, and why."""
_SEARCHES = {"search", "match", "fullmatch", "findall", "finditer", "startswith", "endswith", "removeprefix"}


def parsed(tree: ast.AST) -> Iterator[int]:
    """Lines in which the text of an exception is searched, compared or taken from gRPC."""
    caught = {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.name}

    def is_text(node: ast.AST) -> bool:
        return (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "str"
            and any(isinstance(argument, ast.Name) and argument.id in caught for argument in node.args)
        )

    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and any(map(is_text, [node.left, *node.comparators])):
            yield node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_search = node.func.attr in _SEARCHES and any(map(is_text, [node.func.value, *node.args]))
            if node.func.attr == "details" or is_search:
                yield node.lineno


def test_no_message_is_parsed() -> None:
    found = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if any(parsed(ast.parse(path.read_text())))
    }
    assert found == FOREIGN.keys()


def test_parsing_is_noticed() -> None:
    wrong = [
        "'row' in str(error)",
        "re.search('row', str(error))",
        "str(error).startswith('row')",
        "str(error) == 'x'",
        "error.details()",
    ]
    for line in wrong:
        assert list(parsed(ast.parse(f"try:\n  pass\nexcept ValueError as error:\n  {line}"))) == [4], line
    assert not list(parsed(ast.parse("try:\n  pass\nexcept ValueError as error:\n  print(str(error))")))
