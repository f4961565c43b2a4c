"""How many random cases a test tries: some wherever the suite runs, many under `make fuzz`."""

from hypothesis import settings

settings.register_profile("suite", max_examples=30, deadline=None)
settings.register_profile("fuzz", max_examples=2_000, deadline=None)
settings.load_profile("suite")  # pytest's --hypothesis-profile loads another


def trials(few: int, many: int) -> int:
    """`many` under `make fuzz`, else `few`: for tests that draw by themselves."""
    return many if settings.get_current_profile_name() == "fuzz" else few
