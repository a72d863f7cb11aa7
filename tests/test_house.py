"""The walls hold: linters, types, who imports whom, and what ARCHITECTURE.md says is so."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from engine.request import draw_transitions

ROOT = Path(__file__).parent.parent
PRODUCT = [path for room in ("engine", "transport", "web", "fuzz") for path in sorted((ROOT / room).rglob("*.py"))]


def run(*command: str) -> None:
    result = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_ruff_finds_nothing() -> None:
    run("-m", "ruff", "check", ".")


def test_ruff_would_format_nothing() -> None:
    run("-m", "ruff", "format", "--check", ".")


@pytest.mark.slow
def test_types_are_strict() -> None:
    run("-m", "mypy")


@pytest.mark.slow
def test_nobody_imports_through_a_wall() -> None:
    run("-c", "from importlinter.cli import lint_imports_command; lint_imports_command()")


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_of_ours_imports_asyncio_or_pickle(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
        assert not {name.split(".")[0] for name in names} & {"asyncio", "pickle", "cloudpickle"}


def _section(begins: str, ends: str) -> str:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    return text[text.index(begins) :].partition(ends)[0]


def _files_with(holds: Callable[[ast.AST], bool], rooms: Sequence[str] = ("engine", "transport", "web")) -> set[str]:
    names = [path.relative_to(ROOT).as_posix() for path in PRODUCT]
    trees = {name: ast.parse((ROOT / name).read_text()) for name in names if name.split("/")[0] in rooms}
    return {name for name, tree in trees.items() if any(map(holds, ast.walk(tree)))}


def _imports_inside(node: ast.AST) -> bool:
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return is_function and any(isinstance(inner, ast.Import | ast.ImportFrom) for inner in ast.walk(node))


def test_imports_inside_functions_stand_where_architecture_says() -> None:
    said = set(re.findall(r"`(engine/\S+\.py)`", _section("8. Imports inside functions", "\n## ")))
    assert _files_with(_imports_inside, ("engine", "transport", "web", "fuzz")) | {"engine/__init__.py"} == said


def _catches_anything(node: ast.AST) -> bool:
    """Whether it is a handler of any exception, other than one that ends by raising it again."""
    if not isinstance(node, ast.ExceptHandler):
        return False
    names = {"Exception"} if node.type is None else {getattr(name, "id", "") for name in ast.walk(node.type)}
    last = node.body[-1]
    return bool(names & {"Exception", "BaseException"}) and not (isinstance(last, ast.Raise) and last.exc is None)


def test_any_exception_is_caught_where_architecture_says() -> None:
    said = set(re.findall(r"`(\S+\.py)`", _section("## Where any exception is caught", "\n## Who")))
    in_a_program_of_its_own = {"engine/models/hub.py"}  # as text
    assert _files_with(_catches_anything) | in_a_program_of_its_own == said


def test_transport_alone_knows_zmq() -> None:
    for path in PRODUCT:
        imports = re.search(r"^(import|from) zmq\b", path.read_text(), flags=re.MULTILINE)
        assert imports is None or path.parent.name == "transport", path


MAX_FUNCTION_LINES, MAX_NESTING = 60, 3
PURE = [*(ROOT / "engine/scheduler").glob("*.py"), *(ROOT / "engine/kv_cache").glob("*.py"), ROOT / "engine/core.py"]
BLOCKS = ast.If | ast.For | ast.While | ast.With | ast.Try | ast.Match


def _nesting(node: ast.AST, is_elif: bool = False) -> int:
    """Return how many blocks stand in one another at the deepest place in `node`; an elif is as deep as its if."""
    others = node.orelse if isinstance(node, ast.If) else []
    inner = [
        _nesting(child, is_elif=isinstance(child, ast.If) and others == [child]) for child in ast.iter_child_nodes(node)
    ]
    return (isinstance(node, BLOCKS) and not is_elif) + max(inner, default=0)


@pytest.mark.parametrize("path", PURE, ids=lambda path: path.name)
def test_a_newcomer_can_read_the_scheduler_its_cache_and_the_core(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert num_lines <= MAX_FUNCTION_LINES, f"{node.name} has {num_lines} lines"
            assert _nesting(node) <= MAX_NESTING, f"{node.name} nests {_nesting(node)} blocks"


def test_nesting_is_counted_in_blocks_and_an_elif_is_none() -> None:
    chain = "if a:\n  pass\nelif b:\n  for c in d:\n    pass\nelif e:\n  pass"
    assert [_nesting(ast.parse(code)) for code in ("a = 1", "if a:\n  pass", chain)] == [0, 1, 2]
    assert _nesting(ast.parse("for a in b:\n  while c:\n    with d:\n      if e:\n        pass")) == 4


def _claims() -> list[tuple[str, str]]:
    """Paths and symbols that the table of known names in ARCHITECTURE.md claims to exist."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    table = text[text.index("## Names known from vLLM") :]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")][1:]
    return [(row[0].strip(), row[1].strip()) for row in rows if not set(row[0]) <= set("- ")]


@pytest.mark.parametrize(("known", "here"), _claims() if (ROOT / "ARCHITECTURE.md").exists() else [])
def test_every_known_name_lives_where_the_table_says(known: str, here: str) -> None:
    claims = re.findall(r"`([^`]+)`", here)
    assert claims or "to come" in here or here == "none", f"{known}: names no place"
    for claim in claims:
        path, _, symbol = claim.partition(":")
        source = ROOT / path
        if "to come" in here and not source.exists():
            continue
        assert source.exists(), f"{known}: {path} does not exist"
        for name in filter(None, symbol.split(".")):
            pattern = rf"\b{re.escape(name)}\b"
            assert re.search(pattern, source.read_text()), f"{known}: {path} has no {name}"


def test_the_diagram_of_states_is_drawn_from_the_table() -> None:
    assert draw_transitions() in (ROOT / "ARCHITECTURE.md").read_text()


def test_every_file_of_ours_is_in_the_table_of_rooms() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for path in PRODUCT:
        name = path.relative_to(ROOT).as_posix()
        if path.name != "__init__.py":
            assert name in text, f"ARCHITECTURE.md does not say what {name} is for"


def test_no_machines_path_stands_in_anything_committed() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    assert files or not (ROOT / ".git").exists()
    for name in files or [str(path.relative_to(ROOT)) for path in PRODUCT]:
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".html", ".js", ".css", ""} and path.is_file():
            found = re.search(r"(?<![\w.])/(work|farm|root|home)/\w", path.read_text(errors="replace"))
            assert found is None or path == Path(__file__), f"{name}: {found}"
