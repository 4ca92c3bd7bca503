"""What a wheel carries: every file of a shipped package, so that an installed Tandem is the one that was tested.

Asks setuptools for its list instead of building: the compiler would take most of a minute.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
# What the build would copy by pyproject.toml.
PROGRAM = """
import json
from setuptools.dist import Distribution
distribution = Distribution({"script_name": "setup.py"})
distribution.parse_config_files()
distribution.include_package_data = False  # an old list of sources in the tree would hide what the patterns miss
build = distribution.get_command_obj("build_py")
build.ensure_finalized()
modules = [path for _, _, path in build.find_all_modules()]
data = [f"{source}/{name}" for _, source, _, names in build.data_files for name in names]
print(json.dumps([*modules, *data]))
"""
# Made at the build or by the interpreter, not sources.
MADE = {".so", ".digest", ".pyc"}


@pytest.fixture(scope="module")
def carried() -> set[Path]:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return {Path(name) for name in json.loads(ended.stdout.splitlines()[-1])}


def test_every_file_of_a_shipped_package_is_in_the_wheel(carried: set[Path]) -> None:
    roots = [REPOSITORY / name for name in _packages()] + [REPOSITORY / "proto" / "tandem"]
    sources = {
        path.relative_to(REPOSITORY)
        for root in roots
        for path in root.rglob("*")
        if path.is_file() and path.suffix not in MADE and not path.name.startswith(".")
    }
    assert len(sources) > 400
    assert sources - carried == set()


def test_the_wheel_has_no_tests(carried: set[Path]) -> None:
    assert not [path for path in carried if path.parts[0] in ("tests", "docs", "requirements")]


def _packages() -> list[str]:
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        patterns = tomllib.load(file)["tool"]["setuptools"]["packages"]["find"]["include"]
    return [pattern.rstrip("*") for pattern in patterns if pattern != "tandem*"]
