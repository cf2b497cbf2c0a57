"""What holds for the whole project: imports, names, the wheel, the documents."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CODE = ("autopar", "passes", "cost", "models")
PRIVATE = re.compile(r"^(torch\.(.*\.)?_(?!_)\w+)")
EXTRAS = ("typer", "rich", "transformers", "matplotlib")


def sources(*folders: str) -> Iterator[Path]:
    """Every Python file, each once (the links inside the package are left out)."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(p.is_symlink() for p in path.parents):
                yield path


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that is imported when the code runs, also inside functions."""
    typing = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    skipped = {inner for node in typing for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def attributes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every attribute of torch."""
    for node in ast.walk(tree):
        names, here = [], node
        while isinstance(here, ast.Attribute):
            names.append(here.attr)
            here = here.value
        if names and isinstance(here, ast.Name) and here.id == "torch":
            yield node.lineno, ".".join(["torch", *reversed(names)])  # type: ignore[attr-defined]


def found(test: str, *folders: str) -> list[str]:
    """Places whose imported name matches a pattern."""
    return [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in sources(*folders)
        for line, name in imports(ast.parse(path.read_text()))
        if re.match(test, name)
    ]


def test_the_rooms_are_imported_under_the_package_name() -> None:
    assert found(r"(passes|cost|models)(\.|$)", *CODE, "tests", "benchmarks") == []


def private(path: Path) -> list[str]:
    """Private names of torch in a file; `torch.ops._c10d_functional` is how functional collectives are called."""
    tree = ast.parse(path.read_text())
    names = [*imports(tree), *attributes(tree)]
    return [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for line, name in names
        if PRIVATE.match(name) and not name.startswith("torch.ops.")
    ]


def test_private_names_of_torch_stand_in_one_file() -> None:
    assert [name for path in sources(*CODE) if path.name != "_torch.py" for name in private(path)] == []


def test_no_logic_knows_a_kind_of_device() -> None:
    """`cuda` stands in presets of clusters and in texts only: no name, attribute or comparison."""
    wrong = []
    for path in sources("autopar", "passes"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            compared = any(isinstance(s, ast.Constant) and s.value == "cuda" for s in sides)
            if name == "cuda" or compared:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert wrong == []


def test_dependencies_point_one_way() -> None:
    assert found(r"autopar\.(cost|planner|passes|runtime|api|choices)", "autopar/rules") == []
    described = r"\.(markers|buckets|in_place)"  # what a program is like; the rest of the room makes programs
    assert found(rf"autopar\.(planner|passes(?!{described})|runtime|api)", "cost") == []
    assert found(r"autopar\.(runtime|api)", "autopar/planner") == []
    assert found(r"autopar\.(planner|runtime|api)", "passes") == []
    assert found(r"autopar(?!\.models|\.experts)", "models") == []


def test_nothing_imports_an_extra_but_what_needs_it() -> None:
    allowed = (
        "autopar/commands.py",
        "autopar/verify/target.py",
        "autopar/adapters.py",
        "autopar/hf.py",
        "autopar/hf_inputs.py",
    )
    wrong = found(rf"({'|'.join(EXTRAS)})(\.|$)", *CODE)
    assert [place for place in wrong if not place.startswith(allowed)] == []


BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def run(code: str, *, blocked: tuple[str, ...] = (), cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    text = BLOCKED.format(names=set(blocked) or "()") + code
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=cwd, timeout=120)


def test_the_core_imports_without_the_extras() -> None:
    code = (
        "import autopar\n"
        "for name in autopar.__all__: getattr(autopar, name)\n"
        "import autopar.api, autopar.planner, autopar.passes, autopar.runtime, autopar.files, autopar.verify.run\n"
        "print('fine')"
    )
    done = run(code, blocked=EXTRAS)
    assert done.stdout == "fine\n", done.stderr


def test_the_command_says_what_it_needs() -> None:
    done = run("from autopar.cli import main; main()", blocked=("typer",))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "autopar: the command line needs typer: pip install 'autopar[cli]'\n"


# --- the package ------------------------------------------------------------------------------------------------------


def packages() -> set[str]:
    """Every folder with Python files, as a package name."""
    return {
        ".".join(path.parent.relative_to(ROOT).parts if path.parts[len(ROOT.parts)] == "autopar" else
                 ("autopar", *path.parent.relative_to(ROOT).parts))
        for path in sources(*CODE)
    }  # fmt: skip


def test_pyproject_lists_every_package() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert set(listed) == packages()


def test_a_wheel_holds_the_rooms_and_needs_no_links(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(tmp_path),
        ".",
    ]
    subprocess.run(command, cwd=copied(tmp_path / "source"), check=True, timeout=180)
    (wheel,) = tmp_path.glob("autopar-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    expected = {p.replace(".", "/") for p in packages()}
    assert {str(p.parent.relative_to(tmp_path / "site")) for p in (tmp_path / "site").rglob("*.py")} == expected
    where = "import sys; sys.path.insert(0, 'site')\n"
    done = run(where + "import autopar.passes, autopar.cost, autopar.models.gpt as m; print(m.__file__)", cwd=tmp_path)
    assert done.stdout.strip() == str(tmp_path / "site/autopar/models/gpt.py") or done.stdout.strip() == (
        "site/autopar/models/gpt.py"
    ), done.stderr


def copied(folder: Path) -> Path:
    """The tree without its links, so that a wheel that needs them breaks."""
    import shutil

    for name in ("pyproject.toml", "README.md", "LICENSE", *CODE):
        source = ROOT / name
        if source.is_dir():
            skip = shutil.ignore_patterns("__pycache__", *("cost", "passes", "models" if name == "autopar" else ""))
            shutil.copytree(source, folder / name, ignore=skip if name == "autopar" else None)
        else:
            folder.mkdir(exist_ok=True)
            shutil.copy(source, folder / name)
    return folder


# --- documents --------------------------------------------------------------------------------------------------------


def test_the_readme_names_only_targets_that_exist() -> None:
    made = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", (ROOT / "README.md").read_text()))
    assert named <= made
    assert {"setup", "demo", "too-big", "test", "parity", "lint"} <= named


def test_documents_link_to_files_that_exist() -> None:
    for document in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "LICENSE", "docs/design.md", "docs/limits.md"])
def test_documents_are_there(name: str) -> None:
    assert (ROOT / name).stat().st_size > 100
