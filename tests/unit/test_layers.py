"""The layers hold: who may import whom, where unsafe code may be, and that each module says what it owns."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "python" / "relight"
PYTHON = sorted((REPOSITORY / "python").rglob("*.py"))
RUST = sorted((REPOSITORY / "rust").rglob("*.rs"))
WITH_TORCH = ("torch", "distributed", "integrations")  # the only folders of the package that import torch


def name(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def imports(path: Path, *, at_import: bool) -> set[str]:
    """The top-level packages that a file imports: all, or only those that importing the file itself imports."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
        elif at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                visit(child)
            return
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


def manifest(crate: str) -> dict:
    return tomllib.loads((REPOSITORY / "rust" / crate / "Cargo.toml").read_text())


def code_of(path: Path) -> str:
    """Rust without comments, strings and attributes: `unsafe` in prose is not unsafe."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"', " ", text, flags=re.DOTALL)
    return re.sub(r"#!?\[[^\]]*\]", " ", text)


@pytest.mark.parametrize("path", PYTHON, ids=name)
def test_only_the_torch_folders_import_torch(path: Path) -> None:
    """Guards: `relight ls` on a machine without torch."""
    if path.is_relative_to(PACKAGE) and path.relative_to(PACKAGE).parts[0] in WITH_TORCH:
        return
    assert "torch" not in imports(path, at_import=False)


def test_import_relight_and_the_command_line_load_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import relight, relight.cli, relight.cli.main; relight.Checkpointer"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_command_line_does_not_reach_into_the_training_side() -> None:
    """It stands on the engine and the errors, so that it works where nothing of torch's side does."""
    allowed = {"relight._core", "relight.exceptions"}
    for path in sorted((PACKAGE / "cli").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("relight"):
                modules = {f"relight.{a.name}" for a in node.names} if node.module == "relight" else {node.module}
                strange = {m for m in modules if m not in allowed and not m.startswith("relight.cli")}
                assert not strange, f"{name(path)} imports {strange}"


@pytest.mark.parametrize(
    ("crate", "may_use"),
    [
        ("format", set()),
        ("io", set()),
        ("engine", {"relight-format", "relight-io"}),
        ("py", {"relight-engine"}),
        ("testkit", {"relight-engine"}),
    ],
)
def test_crates_depend_only_downwards(crate: str, may_use: set[str]) -> None:
    ours = {dependency for dependency in manifest(crate).get("dependencies", {}) if dependency.startswith("relight-")}
    assert ours <= may_use, f"rust/{crate} uses {sorted(ours - may_use)}"


def test_there_are_five_crates() -> None:
    """Guards: a new crate without a rule above."""
    workspace = tomllib.loads((REPOSITORY / "Cargo.toml").read_text())["workspace"]["members"]
    assert sorted(workspace) == [f"rust/{crate}" for crate in ("engine", "format", "io", "py", "testkit")]


def test_only_the_binding_knows_pyo3() -> None:
    for crate in ("format", "io", "engine", "testkit"):
        for table in ("dependencies", "dev-dependencies", "build-dependencies"):
            assert "pyo3" not in manifest(crate).get(table, {}), crate
    outside = [name(p) for p in RUST if p.parts[-3] != "py" and "/py/" not in p.as_posix() and "pyo3" in code_of(p)]
    assert not outside


def test_unsafe_code_is_only_in_io() -> None:
    outside = [name(p) for p in RUST if "/rust/io/" not in p.as_posix() and re.search(r"\bunsafe\b", code_of(p))]
    assert not outside


def test_the_compiler_enforces_it_too() -> None:
    for crate in ("format", "engine", "testkit"):
        assert "#![forbid(unsafe_code)]" in (REPOSITORY / "rust" / crate / "src" / "lib.rs").read_text(), crate
    binding = (REPOSITORY / "rust" / "py" / "src" / "lib.rs").read_text()
    assert re.search(r"#!\[(deny|forbid)\(unsafe_code\)\]", binding)


def has_code(path: Path) -> bool:
    """Whether there is anything that could own something: not an empty `__init__` or a list of re-exports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef) for node in tree.body)


@pytest.mark.parametrize("path", [p for p in PYTHON if has_code(p)], ids=name)
def test_each_python_module_says_what_it_is_for(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), "a module opens with what it is for"


def is_verb(path: Path) -> bool:
    """A verb of the command line: its docstring is what `relight VERB --help` prints."""
    return path.parent.name == "cli" and "HELP = " in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", [p for p in PYTHON if has_code(p) and not is_verb(p)], ids=name)
def test_each_python_module_says_what_it_owns_and_must_not(path: Path) -> None:
    head = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert "Owns:" in head, "the header lacks `Owns:`"
    assert "Must not:" in head, "the header lacks `Must not:`"


@pytest.mark.parametrize(
    "path", [p for p in RUST if "/src/" in p.as_posix() and not p.stem.endswith("tests")], ids=name
)
def test_each_rust_module_says_what_it_owns_and_must_not(path: Path) -> None:
    head = "\n".join(line for line in path.read_text(encoding="utf-8").splitlines()[:40] if line.startswith("//!"))
    assert "Owns:" in head, "the header lacks `Owns:`"
    assert "Must not:" in head, "the header lacks `Must not:`"
