// Python bindings of the CPU kernels: checks shapes, drops the GIL, calls. Tensors cross as DLPack.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <string>

#include "pack.h"

namespace nb = nanobind;
using Bytes = nb::ndarray<std::uint8_t, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const std::uint8_t, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<float, nb::c_contig, nb::device::cpu>;
using ConstFloats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;

namespace {

void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

struct Job {
  kvfold::PageShape shape;
  std::size_t pages;
};

// `codes_shape` is that of the unpacked side, (pages, P, D); `packed_bytes` that of the packed side.
template <typename Codes>
Job check(const Codes& codes, std::size_t packed_bytes, const nb::bytes& bits, bool lanes_are_tokens) {
  require(codes.ndim() == 3, "codes must have the shape (pages, page_size, head_dim)");
  Job job{{codes.shape(1), codes.shape(2), reinterpret_cast<const std::uint8_t*>(bits.c_str()),
           lanes_are_tokens},
          codes.shape(0)};
  require(job.shape.page_size % kvfold::kTile == 0, "page_size must be a multiple of 16");
  require(bits.size() == (job.shape.head_dim + kvfold::kTile - 1) / kvfold::kTile,
          "bits must have one entry for each group of 16 channels");
  for (std::size_t i = 0; i < bits.size(); ++i)
    require(job.shape.bits[i] >= 1 && job.shape.bits[i] <= 8, "bits must be 1 to 8");
  require(packed_bytes == job.pages * job.shape.code_bytes(), "packed must have page_size * 2 * sum(bits) bytes a page");
  return job;
}

void pack(ConstBytes codes, Bytes packed, nb::bytes bits, bool lanes_are_tokens) {
  const Job job = check(codes, packed.size(), bits, lanes_are_tokens);
  nb::gil_scoped_release release;
  kvfold::serial::pack(codes.data(), packed.data(), job.pages, job.shape);
}

void unpack(ConstBytes packed, Bytes codes, nb::bytes bits, bool lanes_are_tokens) {
  const Job job = check(codes, packed.size(), bits, lanes_are_tokens);
  nb::gil_scoped_release release;
  kvfold::serial::unpack(packed.data(), codes.data(), job.pages, job.shape);
}

void unpack_levels(ConstBytes packed, ConstFloats lut, Floats levels, nb::bytes bits, bool lanes_are_tokens) {
  const Job job = check(levels, packed.size(), bits, lanes_are_tokens);
  require(lut.ndim() == 2 && lut.shape(0) == bits.size(), "lut must have one row for each group of 16 channels");
  for (std::size_t i = 0; i < bits.size(); ++i)
    require(lut.shape(1) >= (std::size_t{1} << job.shape.bits[i]), "lut must have 2^bits levels a group");
  nb::gil_scoped_release release;
  kvfold::serial::unpack_levels(packed.data(), lut.data(), lut.shape(1), levels.data(), job.pages, job.shape);
}

}  // namespace

NB_MODULE(_cpu, m) {
  m.def("pack", &pack);
  m.def("unpack", &unpack);
  m.def("unpack_levels", &unpack_levels);
}
