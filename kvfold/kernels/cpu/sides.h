// Kernels by instruction set, and sides of pages by the addresses of torch tensors.
#pragma once

#include <nanobind/nanobind.h>

#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "attend.h"
#include "channelwise.h"
#include "copy.h"
#include "fold.h"

namespace nb = nanobind;

namespace {

void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

template <typename T>
const T* pointer(std::uintptr_t address) {
  return reinterpret_cast<const T*>(address);
}

// A kvfold::Side that owns its bits and groups. Addresses and strides are those of torch tensors, which the caller keeps alive
// and whose shapes it has checked.
struct OwnedSide : kvfold::Side {
  std::string own_bits, own_groups;
  std::size_t row_bytes = 0;  // of 16 tokens
  OwnedSide(std::uintptr_t code_at, std::size_t code_batch_stride, std::size_t code_head_stride, std::size_t page_size,
            std::size_t code_dim, nb::bytes bits, bool lanes_are_tokens, std::uintptr_t lut_at, std::size_t lut_row,
            bool levels_are_unit, bool shifts_are_scaled)
      : own_bits(bits.c_str(), bits.size()) {
    code = pointer<std::uint8_t>(code_at);
    code_batch = code_batch_stride, code_head = code_head_stride;
    shape.page_size = page_size, shape.head_dim = code_dim, shape.lanes_are_tokens = lanes_are_tokens;
    lut = pointer<float>(lut_at), lut_stride = lut_row, unit_levels = levels_are_unit;
    scaled_shifts = shifts_are_scaled;
    for (const char b : own_bits) row_bytes += 32 * static_cast<std::size_t>(b);
    page_bytes = own_bits.empty() ? 2 * page_size * code_dim : page_size / kvfold::kTile * row_bytes;
  }
  // Reads the first channels only, of codes whose lanes are tokens.
  void set_first_channels(std::size_t code_dim) {
    const std::size_t tiles = (code_dim + kvfold::kTile - 1) / kvfold::kTile;
    require(shape.lanes_are_tokens && tiles <= own_bits.size(), "only the first channels of keys can be read");
    for (std::size_t i = tiles; i < own_bits.size(); ++i) skipped_bytes += 32 * static_cast<std::size_t>(own_bits[i]);
    own_bits.resize(tiles), shape.head_dim = code_dim;
  }
  void set_scale(std::uintptr_t scale_at, int dtype, bool is_signed, std::uintptr_t offset_at, std::size_t batch,
                 std::size_t head, std::size_t n, nb::bytes group_of_each_tile) {
    scale = pointer<void>(scale_at), offset = pointer<std::uint16_t>(offset_at);
    scale_dtype = static_cast<kvfold::Dtype>(dtype), signed_scale = is_signed;
    scale_batch = batch, scale_head = head, groups = n;
    own_groups.assign(group_of_each_tile.c_str(), group_of_each_tile.size());
  }
  void set_plain(std::uintptr_t at, std::size_t batch, std::size_t head, std::size_t dim) {
    plain = pointer<std::uint16_t>(at), plain_batch = batch, plain_head = head, plain_dim = dim;
  }
  void set_centre(std::uintptr_t centre_at, std::uintptr_t channel_scale_at, std::size_t batch, std::size_t head,
                  std::size_t dim) {
    centre = pointer<std::uint16_t>(centre_at), channel_scale = pointer<std::uint16_t>(channel_scale_at);
    centre_batch = batch, centre_head = head, centre_dim = dim;
  }
  kvfold::Side view() const {
    const std::size_t tiles = (shape.head_dim + kvfold::kTile - 1) / kvfold::kTile;
    require(groups == 1 || own_groups.size() >= tiles, "every 16 channels must have a scale group");
    require(centre_dim <= tiles * kvfold::kTile, "centres must not be wider than codes");
    kvfold::Side side = *this;
    side.shape.bits = own_bits.empty() ? nullptr : reinterpret_cast<const std::uint8_t*>(own_bits.data());
    if (groups > 1) side.group_of_tile = reinterpret_cast<const std::uint8_t*>(own_groups.data());
    return side;
  }
};

// The instruction sets that this machine runs, best first.
std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi")) names.push_back("avx512vbmi");
    if (__builtin_cpu_supports("avx512vnni")) names.push_back("avx512vnni");
    names.push_back("avx512");
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) names.push_back("avx2");
#endif
  names.push_back("serial");
  return names;
}

// The kernels of one instruction set.
struct Kernels {
  bool (*attend)(const kvfold::Attention&);
  bool (*in_integers)(const kvfold::Side&);
  void (*fold_channelwise)(const kvfold::Channelwise&);
  void (*fold)(const kvfold::Fold&);
  bool (*copy)(const kvfold::Copy&);
};

const Kernels& find(const std::string& isa) {
  static const std::map<std::string, Kernels> known = [] {
    using namespace kvfold;
    std::map<std::string, Kernels> all;
    for (const std::string& name : instruction_sets()) {
#if defined(__x86_64__)
      namespace wide = avx512;
      if (name == "avx512vbmi")
        all[name] = {avx512vbmi::attend, avx512vbmi::in_integers, wide::fold_channelwise, wide::fold, wide::copy};
      if (name == "avx512vnni")
        all[name] = {avx512vnni::attend, avx512vnni::in_integers, wide::fold_channelwise, wide::fold, wide::copy};
      if (name == "avx512") all[name] = {wide::attend, wide::in_integers, wide::fold_channelwise, wide::fold, wide::copy};
      if (name == "avx2") all[name] = {avx2::attend, avx2::in_integers, avx2::fold_channelwise, avx2::fold, avx2::copy};
#endif
      if (name == "serial")
        all[name] = {serial::attend, serial::in_integers, serial::fold_channelwise, serial::fold, serial::copy};
    }
    return all;
  }();
  const auto found = known.find(isa);
  if (found != known.end()) return found->second;
  throw std::invalid_argument("this machine does not run " + isa);
}

}  // namespace
