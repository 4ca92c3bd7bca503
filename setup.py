"""Builds the native libraries with the package; everything else is in pyproject.toml.

They have no Python ABI, so one wheel of a platform serves every Python. Without a C++ compiler the install goes on and
says so: workers then run the torch backend, and KV frames are copied by Python.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # an isolated build does not have the source tree on its path

import engine.native.build  # noqa: E402
import kv_transfer.native.build  # noqa: E402
from cluster.compiler import BuildError  # noqa: E402

NATIVE_PACKAGES = (engine.native.build, kv_transfer.native.build)


class BuildWithNativeLibraries(build_py):
    """`build_py` that puts each library beside its sources: in the tree when editable, else in the wheel."""

    def run(self) -> None:
        super().run()
        for package in NATIVE_PACKAGES:
            in_wheel = Path(self.build_lib) / package.SOURCE_DIR.relative_to(ROOT)
            try:
                library = package.build(package.SOURCE_DIR if self.editable_mode else in_wheel)
            except BuildError as error:
                self.warn(f"{package.LIBRARY_NAME} is not built, what stands in for it is slower: {error}")
                continue
            self.announce(f"built {library}", level=2)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        libraries = [
            Path(self.build_lib) / package.SOURCE_DIR.relative_to(ROOT) / package.LIBRARY_NAME
            for package in NATIVE_PACKAGES
        ]
        built = [str(library) for library in libraries if library.is_file()]
        return [*super().get_outputs(include_bytecode), *built]


class NativeDistribution(Distribution):
    """Tells setuptools that the package holds machine code."""

    def has_ext_modules(self) -> bool:
        return True


class AnyPythonWheel(bdist_wheel):
    """A wheel for this platform and any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(distclass=NativeDistribution, cmdclass={"build_py": BuildWithNativeLibraries, "bdist_wheel": AnyPythonWheel})
