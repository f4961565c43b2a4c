"""C++ kernels for CPUs."""

try:
    import kvfold.kernels.cpu._cpu as module
except ImportError as error:
    raise ImportError(
        "kvfold's C++ module is not built. Install the package instead of running from its source folder: "
        "`make setup` in a clone, or `pip install .`; both need a C++20 compiler (Debian: apt-get install g++)."
    ) from error

__all__ = ["module"]
