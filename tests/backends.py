"""The CPU kernel with an instruction set of one's choice, as a backend."""

from functools import partial
from types import SimpleNamespace
from typing import Any

from kvfold.attention import cpu


def with_instruction_set(isa: str) -> Any:
    """As `kvfold.attention.cpu` on a processor whose best instruction set is `isa`."""
    own = {name: partial(getattr(cpu, name), instruction_set=isa) for name in ("attend_rows", "attend_pool", "step_of")}
    return SimpleNamespace(why_not=cpu.why_not, **own)
