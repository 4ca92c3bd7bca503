"""Builds the native CPU library with the package; everything else is in pyproject.toml.

The library has no Python ABI, so one wheel of a platform serves every Python. Without a C++ compiler the install goes
on and says so: workers then run the torch backend.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # an isolated build does not have the source tree on its path

from engine.native.build import LIBRARY_NAME, SOURCE_DIR, BuildError, build  # noqa: E402


class BuildWithNativeLibrary(build_py):
    """`build_py` that puts the library beside its sources: in the tree when editable, else in the wheel."""

    def run(self) -> None:
        super().run()
        in_wheel = Path(self.build_lib) / SOURCE_DIR.relative_to(ROOT)
        try:
            library = build(SOURCE_DIR if self.editable_mode else in_wheel)
        except BuildError as error:
            self.warn(f"the native CPU library is not built, the torch backend will be used: {error}")
            return
        self.announce(f"built {library}", level=2)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        library = Path(self.build_lib) / SOURCE_DIR.relative_to(ROOT) / LIBRARY_NAME
        return [*super().get_outputs(include_bytecode), *([str(library)] if library.is_file() else [])]


class NativeDistribution(Distribution):
    """Tells setuptools that the package holds machine code."""

    def has_ext_modules(self) -> bool:
        return True


class AnyPythonWheel(bdist_wheel):
    """A wheel for this platform and any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(distclass=NativeDistribution, cmdclass={"build_py": BuildWithNativeLibrary, "bdist_wheel": AnyPythonWheel})
