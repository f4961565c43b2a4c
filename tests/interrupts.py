"""Interrupts at any line of the package, as Ctrl-C may come."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import kvfold

PACKAGE = str(Path(kvfold.__file__).parent)


def interrupted_at(line: int, change: Callable[[], object]) -> bool:
    """Raise KeyboardInterrupt before the `line`-th line of kvfold's that `change` runs; whether it came so far."""
    left = line

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        change()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
