"""What pyproject.toml cannot say: CFFI builds the native shim, and the patches go into the package."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildPy(build_py):
    """Copies the patch series to `llamahybrid/patches` (a checkout is used where it lies)."""

    def run(self) -> None:
        """Copy the package, then the series; without what an earlier build of another version left there."""
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib, "llamahybrid"), ignore_errors=True)
        super().run()
        if not self.editable_mode:
            self.copy_tree("patches", str(Path(self.build_lib, "llamahybrid", "patches")))


setup(
    cffi_modules=["native/build_shim.py:ffibuilder"],
    cmdclass={"build_py": BuildPy},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
