"""The command line, run from tests."""

import subprocess
import sys

import fuzz_cli


def run_kvfold(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it in this process, which has imported torch already."""
    status, out, err = fuzz_cli.call(list(arguments))
    return subprocess.CompletedProcess(arguments, status, out, err)


def run_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it as a user does, in a process of its own."""
    command = [sys.executable, "-c", "from kvfold.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)
