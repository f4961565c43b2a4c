"""Runs Metal kernels where there is no Metal: as C++, each thread of a threadgroup a thread of the CPU.

What differs from Metal is written out below and nowhere else: address spaces mean nothing, `threadgroup` arrays are
static since threadgroups run one after the other, and barriers and sums over 32 lanes wait for each other.
"""

import ctypes
import hashlib
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import torch
from torch import Tensor

from kvfold.kernels.mlx.arrays import to_mlx, to_torch

PRELUDE = """
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>
#define device
#define constant
#define thread
#define threadgroup static
using std::exp, std::max, std::min;
struct uint3 { unsigned x, y, z; };
using float16_t = _Float16;
enum class mem_flags { mem_threadgroup };
thread_local int own_thread;
static std::unique_ptr<std::barrier<>> all;
static std::vector<std::unique_ptr<std::barrier<>>> groups;
static float lanes[64][32];
static void threadgroup_barrier(mem_flags) { all->arrive_and_wait(); }
template <typename F> static float over_lanes(float x, F join) {
  const int group = own_thread / 32;
  lanes[group][own_thread % 32] = x;
  groups[group]->arrive_and_wait();
  float out = lanes[group][0];
  for (int i = 1; i < 32; ++i) out = join(out, lanes[group][i]);
  groups[group]->arrive_and_wait();
  return out;
}
static float simd_sum(float x) { return over_lanes(x, [](float a, float b) { return a + b; }); }
static float simd_max(float x) { return over_lanes(x, [](float a, float b) { return a > b ? a : b; }); }
"""
LAUNCH = """
extern "C" void run(void** args, int threads, int grid_x, int grid_y) {{
  all = std::make_unique<std::barrier<>>(threads);
  groups.clear();
  for (int i = 0; i < threads / 32; ++i) groups.push_back(std::make_unique<std::barrier<>>(32));
  for (unsigned y = 0; y < unsigned(grid_y); ++y)
    for (unsigned x = 0; x < unsigned(grid_x); ++x) {{
      std::vector<std::jthread> team;
      for (unsigned t = 0; t < unsigned(threads); ++t)
        team.emplace_back([=] {{
          own_thread = int(t);
          body({arguments}, uint3{{t, 0, 0}}, uint3{{x, y, 0}});
        }});
    }}
}}
"""
TYPES = {mx.float32: "float", mx.float16: "float16_t", mx.uint8: "uint8_t", mx.int32: "int32_t"}


def metal_kernel(folder: Path) -> Any:
    """Stands for `mx.fast.metal_kernel`; compiles into `folder`."""

    def make(name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str) -> Any:
        def call(
            inputs: Sequence[mx.array], grid: tuple[int, int, int],
            threadgroup: tuple[int, int, int], output_shapes: Sequence[Sequence[int]], output_dtypes: Sequence[Any],
        ) -> list[mx.array]:  # fmt: skip
            kinds = [f"const {TYPES[x.dtype]}*" for x in inputs] + [f"{TYPES[d]}*" for d in output_dtypes]
            names = [*input_names, *output_names]
            signature = ", ".join(f"{kind} {own}" for kind, own in zip(kinds, names, strict=True))
            arguments = ", ".join(f"({kind})args[{i}]" for i, kind in enumerate(kinds))
            code = (
                f"{PRELUDE}{header}\nstatic void body({signature}, uint3 thread_position_in_threadgroup, "
                f"uint3 threadgroup_position_in_grid) {{\n{source}\n}}\n{LAUNCH.format(arguments=arguments)}"
            )
            stem = folder / hashlib.sha256(code.encode()).hexdigest()[:16]
            if not stem.with_suffix(".so").exists():
                stem.with_suffix(".cpp").write_text(code)
                command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-Wall", "-Werror"]
                command += ["-Wno-unused-variable", "-Wno-unused-but-set-variable", "-Wno-div-by-zero"]
                command += ["-fsanitize=undefined", "-fno-sanitize-recover=undefined", "-static-libubsan"]
                subprocess.run([*command, stem.with_suffix(".cpp"), "-o", stem.with_suffix(".so")], check=True)
            tensors: list[Tensor] = [to_torch(x).clone() for x in inputs]
            tensors += [torch.full(shape, torch.nan) for shape in map(tuple, output_shapes)]
            pointers = (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))
            blocks = [whole // own for whole, own in zip(grid, threadgroup, strict=True)]
            ctypes.CDLL(str(stem.with_suffix(".so"))).run(pointers, threadgroup[0], *blocks[:2])
            return [to_mlx(t) for t in tensors[len(inputs) :]]

        return call

    return make
