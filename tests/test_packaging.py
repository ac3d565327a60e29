"""What an installation holds, and which way imports go."""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent

# Folder -> the package it is installed as.
PACKAGES = {"gtp_compile": "gtp_compile", "passes": "gtp_compile.passes", "kernels": "gtp_compile.kernels"}

# Package -> the parts of gtp_compile that it may import. gtp_compile itself may import all.
ALLOWED_IMPORTS = {
    "gtp_compile.passes": ("gtp_compile.passes", "gtp_compile.kernels"),
    "gtp_compile.kernels": ("gtp_compile.kernels",),
}

# The files that may import private torch modules. Each of them is what a new torch version may break: add one only
# together with the reason why gtp_compile/_compat.py or passes/_compat.py cannot hold the import.
PRIVATE_TORCH_FILES = {
    "gtp_compile/_compat.py",
    "passes/_compat.py",
}

# Private by name only: stable since torch 2.0, and nothing public offers the same for every version we support.
TOLERATED = "torch.utils._pytree"


def sources() -> list[Path]:
    return [path for folder in PACKAGES for path in sorted((ROOT / folder).rglob("*.py"))]


def module_name(path: Path) -> str:
    """The name under which a source file is imported; `gtp_compile.passes` for `passes/__init__.py`."""
    folder, *inner = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([PACKAGES[folder], *(part for part in inner if part != "__init__")])


def imports(module: str, is_package: bool, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute dotted name) of everything imported; `from a import b` gives `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parents = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parents, base] if base else parents)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def imports_of(path: Path) -> list[tuple[int, str]]:
    return list(imports(module_name(path), path.name == "__init__.py", ast.parse(path.read_text())))


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def private_torch_names(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of private torch names that are imported or, for modules, reached as attributes."""
    for line, name in imports_of(path):
        parts = name.removeprefix(TOLERATED).split(".")
        # torch._C itself is the public API's own foundation; its private submodules are not.
        if parts[0] == "torch" and any(part.startswith("_") and part != "_C" for part in parts[1:]):
            yield line, name
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
            and node.attr.startswith("_")
            and node.attr != "_C"
            and find_spec(f"torch.{node.attr}") is not None
        ):
            yield node.lineno, f"torch.{node.attr}"


# What is installed


def listed_packages(root: Path) -> list[str]:
    return sorted(tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])


def test_the_package_list_is_what_the_folders_hold():
    on_disk = {module_name(path) for path in sources() if path.name == "__init__.py"}
    missing = {str(path.parent.relative_to(ROOT)) for path in sources() if not (path.parent / "__init__.py").exists()}
    assert not missing, "these folders need an __init__.py, or the wheel leaves them out"
    assert listed_packages(ROOT) == sorted(on_disk), "change tool.setuptools.packages in pyproject.toml"


def test_the_wheel_holds_every_file_and_imports(tmp_path):
    source, unpacked = tmp_path / "source", tmp_path / "unpacked"
    source.mkdir()
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)
    for folder in PACKAGES:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    build = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        archive.extractall(unpacked)
    expected = {
        "/".join([PACKAGES[folder].replace(".", "/"), path.relative_to(ROOT / folder).as_posix()])
        for folder in PACKAGES
        for path in (ROOT / folder).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    assert held == expected

    # -S keeps the editable install away; torch is then reached through the path it is installed under.
    site = Path(torch.__file__).parent.parent
    code = (
        f"import sys; sys.path[:0] = [{str(unpacked)!r}]; sys.path.append({str(site)!r})\n"
        "import gtp_compile, gtp_compile.kernels, gtp_compile.passes\n"
        "print(gtp_compile.__file__, gtp_compile.kernels.__file__, gtp_compile.passes.__file__, sep='\\n')"
    )
    run = subprocess.run([sys.executable, "-ISc", code], check=True, capture_output=True, text=True)
    assert all(Path(line).is_relative_to(unpacked) for line in run.stdout.split())


def test_the_entry_points_are_installed():
    (backend,) = entry_points(group="torch_dynamo_backends", name="gtp")
    assert backend.value == "gtp_compile.backend:gtp"
    assert "gtp" in torch.compiler.list_backends()
    (command,) = entry_points(group="console_scripts", name="gtp-compile")
    assert command.value == "gtp_compile.cli:main"


def test_the_entry_points_load():
    for group, name in (("torch_dynamo_backends", "gtp"), ("console_scripts", "gtp-compile")):
        (entry,) = entry_points(group=group, name=name)
        assert callable(entry.load())


# Importing gtp_compile


def test_importing_the_package_does_not_import_torch():
    code = "import sys, gtp_compile; assert 'torch' not in sys.modules; assert 'shard' in dir(gtp_compile)"
    subprocess.run([sys.executable, "-Pc", code], check=True)


@pytest.mark.parametrize("module", ["gtp_compile", "gtp_compile.passes"])
def test_torch_logs_may_name_the_package(module):
    environment = {**os.environ, "TORCH_LOGS": f"+{module}"}
    subprocess.run([sys.executable, "-Pc", "import torch"], check=True, env=environment)


def test_the_lazy_names_agree_with_their_list_and_the_type_checkers_imports():
    import gtp_compile

    tree = ast.parse((ROOT / "gtp_compile" / "__init__.py").read_text())
    (guarded,) = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {name.rpartition(".")[2]: name.split(".")[1] for _, name in imports("gtp_compile", True, guarded)}
    assert typed == gtp_compile._HOME
    assert sorted(typed) == gtp_compile.__all__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        gtp_compile.nothing  # noqa: B018


def test_the_lazy_names_load():
    import gtp_compile

    for name in gtp_compile.__all__:
        assert getattr(gtp_compile, name).__name__ == name


# Which way imports go


def test_imports_go_one_way():
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources()
        for package, allowed in ALLOWED_IMPORTS.items()
        if within(module_name(path), package)
        for line, name in imports_of(path)
        if within(name, "gtp_compile") and not any(within(name, target) for target in allowed)
    ]
    assert not wrong, "imports go gtp_compile -> passes -> kernels"


def test_no_bare_import_of_passes_or_kernels():
    bare = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in [*sources(), *sorted((ROOT / "tests").rglob("*.py"))]
        for line, name in imports("tests", True, ast.parse(path.read_text()))
        if within(name, "passes") or within(name, "kernels")
    ]
    assert not bare, "write gtp_compile.passes and gtp_compile.kernels: under two names a module is loaded twice"


def test_a_library_that_probes_for_kernels_in_the_root_does_no_harm():
    """transformers imports a bare `kernels` to ask for its version; in the root of the tree that is ours."""
    code = "import kernels, passes; import gtp_compile.kernels, gtp_compile.passes"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, f"passes and kernels may act only under their full names:\n{run.stderr}"


def test_private_torch_imports_stay_in_few_files():
    private = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in sources()
        if path.relative_to(ROOT).as_posix() not in PRIVATE_TORCH_FILES
        for line, name in private_torch_names(path)
    ]
    assert not private, f"move these to a file of PRIVATE_TORCH_FILES: {private}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch.fx", ["torch.fx"]),
        ("from gtp_compile import weights", ["gtp_compile.weights"]),
        ("from . import b", ["gtp_compile.passes.b"]),
        ("from .base import b", ["gtp_compile.passes.base.b"]),
        ("from .. import weights", ["gtp_compile.weights"]),
        ("from ..weights import b", ["gtp_compile.weights.b"]),
        ("def f():\n    import kernels.bench", ["kernels.bench"]),
    ],
)
def test_the_import_reader_resolves_every_form(source, expected):
    module = imports("gtp_compile.passes.a", False, ast.parse(source))
    package = imports("gtp_compile.passes", True, ast.parse(source))
    assert [name for _, name in module] == expected
    assert [name for _, name in package] == expected


def test_the_search_for_private_names_finds_every_spelling(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "passes" / "a.py"
    path.parent.mkdir()
    path.write_text(
        "import torch._inductor.config\n"
        "from torch import _dynamo\n"
        "from torch.fx._utils import x\n"
        "torch._functorch.config\n"
        "from torch._C import DispatchKey\n"
        "torch._foreach_add_\n"
        "from torch.fx import Graph\n"
    )
    assert [line for line, _ in private_torch_names(path)] == [1, 2, 3, 4]
