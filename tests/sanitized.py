"""Run tests against a package in another folder, in the place of the one installed for editing: `make sanitize`."""

import sys
from pathlib import Path

import pytest

folder, *tests = sys.argv[1:]
sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
sys.path.insert(0, str(Path(folder).resolve()))

import kvfold  # noqa: E402
from kvfold.kernels.cpu import module  # noqa: E402

assert b"__asan_init" in Path(module.__file__).read_bytes(), f"{module.__file__} was built without the sanitizers"
assert Path(kvfold.__file__).is_relative_to(Path(folder).resolve()), kvfold.__file__
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *tests]))
