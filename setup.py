"""The one thing pyproject.toml cannot say: that the native shim is built by CFFI."""

from setuptools import setup

setup(
    cffi_modules=["native/build_shim.py:ffibuilder"],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
