"""Executes the body of a Metal kernel on this machine: compiled as C++, with one thread per thread of a group."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

PROGRAM = """
#include <barrier>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <thread>
#include <vector>
#define device
#define constant
#define threadgroup static
using uint = uint32_t;
struct uint3 { uint x, y, z; };
constexpr uint WIDTH = GROUP_WIDTH;
static std::barrier group(WIDTH);
static float partial[WIDTH];
static thread_local uint own_lane;
namespace metal {
  namespace precise { inline float rsqrt(float x) { return 1.0f / std::sqrt(x); } }
  namespace fast { inline float cos(float x) { return std::cos(x); } inline float sin(float x) { return std::sin(x); } }
  inline float exp2(float x) { return std::exp2(x); }
  inline float simd_sum(float x) {
    partial[own_lane] = x;
    group.arrive_and_wait();
    float sum = 0;
    for (uint i = own_lane / 32 * 32; i < own_lane / 32 * 32 + 32; i++) sum += partial[i];
    group.arrive_and_wait();
    return sum;
  }
  enum class mem_flags { mem_threadgroup };
  inline void threadgroup_barrier(mem_flags) { group.arrive_and_wait(); }
}
CONSTANTS
template <typename E> std::vector<E> read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  std::vector<E> values(bytes.size() / sizeof(E));
  std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(values.data()));
  return values;
}
void body(uint3 thread_position_in_grid, PARAMETERS) {
BODY
}
int main(int, char** argv) {
  LOADED
  for (uint z = 0; z < DEPTH; z++) for (uint y = 0; y < HEIGHT; y++) {
    std::vector<std::thread> lanes;
    for (uint x = 0; x < WIDTH; x++) lanes.emplace_back([&, x] { own_lane = x; body({x, y, z}, ARGUMENTS); });
    for (auto& lane : lanes) lane.join();
  }
  WRITTEN
}
"""


class Argument:
    """An array of a kernel. kind: its type in C++, such as `const T*`. values: of an input; of an output, its shape."""

    def __init__(self, name: str, kind: str, values: NDArray[np.generic] | tuple[int, ...]) -> None:
        self.name, self.kind, self.values = name, kind, values

    @property
    def element(self) -> str:
        """Type of an element."""
        return self.kind.removeprefix("const ").removesuffix("*")


def execute(
    source: str,
    constants: str,
    arguments: Sequence[Argument],
    *,
    groups: tuple[int, int],
    out: type,
    at: Path,
    threads: int = 32,
) -> list[NDArray[np.generic]]:
    """Execute the kernel for a grid of threads x groups; return its outputs. Skips the test without a C++ compiler.

    constants: definitions in C++. threads: of a group, a multiple of 32. out: NumPy's type of the outputs. at: an empty
    directory.
    """
    compiler = shutil.which("g++") or pytest.skip("needs g++")
    loaded, written = [], []
    for index, one in enumerate(arguments, 1):
        if isinstance(one.values, np.ndarray):
            (at / one.name).write_bytes(one.values.tobytes())
            loaded.append(f"auto {one.name}_ = read<{one.element}>(argv[{index}]);")
        else:
            loaded.append(f"std::vector<{one.element}> {one.name}_({int(np.prod(one.values))});")
            size = f"{one.name}_.size() * sizeof({one.element})"
            file = f"std::ofstream(argv[{index}], std::ios::binary)"
            written.append(f"{file}.write(reinterpret_cast<char*>({one.name}_.data()), {size});")
    program = PROGRAM
    for word, text in (
        ("CONSTANTS", constants),
        ("PARAMETERS", ", ".join(f"{one.kind} {one.name}" for one in arguments)),
        ("ARGUMENTS", ", ".join(f"{one.name}_.data()" for one in arguments)),
        ("LOADED", "\n".join(loaded)),
        ("WRITTEN", "\n".join(written)),
        ("GROUP_WIDTH", str(threads)),
        ("HEIGHT", str(groups[0])),
        ("DEPTH", str(groups[1])),
        ("BODY", source),
    ):
        program = program.replace(word, text)
    (at / "kernel.cpp").write_text(program)
    command = [compiler, "-std=c++20", "-O1", "-pthread", "-Wno-multichar", "kernel.cpp", "-o", "kernel"]
    subprocess.run(command, cwd=at, check=True)
    subprocess.run(["./kernel", *(one.name for one in arguments)], cwd=at, check=True)
    return [
        np.frombuffer((at / one.name).read_bytes(), out).reshape(one.values)
        for one in arguments
        if isinstance(one.values, tuple)
    ]
