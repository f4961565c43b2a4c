// Torch tensors as kernels see them, described by torch's C functions. Python attributes would cost a decoding step more: each
// layer's weights evict their code and data from the caches, so both have to come from memory again.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "copy.h"

namespace kvfold {
namespace {

namespace nb = nanobind;

// The start of DLPack's table of C functions (dlpack.h, major version 1), which torch keeps for its tensors.
struct ExchangeTable {
  std::uint32_t major, minor;
  const void *previous, *allocate, *take_from, *give_to;
  int (*describe)(void* object, nb::dlpack::dltensor* out);  // -1, and an exception in Python, if it cannot
};

struct Torch {
  nb::object tensor, is_neg;
  const ExchangeTable* table;
  Torch() {
    tensor = nb::module_::import_("torch").attr("Tensor");
    is_neg = nb::steal(PyUnicode_InternFromString("is_neg"));
    const nb::object capsule = nb::getattr(tensor, "__dlpack_c_exchange_api__", nb::none());
    table = capsule.is_none() ? nullptr : static_cast<const ExchangeTable*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (!table || table->major != 1 || !table->describe)
      throw std::runtime_error("kvfold reads torch's tensors by DLPack's exchange table of version 1, and this torch has none: install torch 2.10 or newer");
  }
};

inline const Torch& torch() {
  static const Torch& known = *new Torch;  // never destroyed, as Python may end before statics do
  return known;
}

// Describes a tensor, for as long as it is not changed; nullopt if it has no memory of its own, or is no tensor of torch.
inline std::optional<nb::dlpack::dltensor> described(nb::handle tensor) {
  nb::dlpack::dltensor seen;
  if (!PyObject_TypeCheck(tensor.ptr(), reinterpret_cast<PyTypeObject*>(torch().tensor.ptr()))) return {};
  if (torch().table->describe(tensor.ptr(), &seen)) {
    PyErr_Clear();
    return {};
  }
  seen.data = static_cast<char*>(seen.data) + seen.byte_offset;
  return seen;
}

inline std::optional<Dtype> dtype_of(nb::dlpack::dtype dtype) {
  const auto code = static_cast<nb::dlpack::dtype_code>(dtype.code);
  if (code == nb::dlpack::dtype_code::Float && dtype.bits == 32) return Dtype::float32;
  if (code == nb::dlpack::dtype_code::Float && dtype.bits == 16) return Dtype::float16;
  if (code == nb::dlpack::dtype_code::Bfloat && dtype.bits == 16) return Dtype::bfloat16;
  return {};
}

// (batch, heads, tokens, dim) in a CPU's memory.
struct Numbered : Numbers {
  std::size_t shape[4];
  bool has_shape(std::size_t rows, std::size_t heads, std::size_t tokens, std::size_t dim) const {
    return shape[0] == rows && shape[1] == heads && shape[2] == tokens && shape[3] == dim;
  }
  const void* at(std::size_t r, std::size_t t) const {
    return static_cast<const char*>(data) + (r * batch + t * token) * bytes_of(dtype);
  }
};

// nullopt if kernels cannot use a tensor in place.
inline std::optional<Numbered> numbers_of(nb::handle tensor) {
  const auto seen = described(tensor);
  if (!seen || seen->ndim != 4 || seen->device.device_type != nb::device::cpu::value || !seen->data) return {};
  const std::optional<Dtype> dtype = dtype_of(seen->dtype);
  if (!dtype || (seen->strides[3] != 1 && seen->shape[3] > 1)) return {};
  const nb::object negative = nb::steal(PyObject_CallMethodObjArgs(tensor.ptr(), torch().is_neg.ptr(), nullptr));
  if (!negative) PyErr_Clear();
  if (negative.ptr() != Py_False) return {};  // a lazy negation is still to be applied
  Numbered numbers;
  numbers.data = seen->data, numbers.dtype = *dtype;
  numbers.batch = seen->strides[0], numbers.head = seen->strides[1], numbers.token = seen->strides[2];
  std::copy_n(seen->shape, 4, numbers.shape);
  return numbers;
}

// Tensors, and where their memory was.
class Addresses {
 public:
  explicit Addresses(std::vector<nb::object> tensors) : tensors_(std::move(tensors)) {
    for (const nb::object& tensor : tensors_) at_.push_back(place(tensor));
  }

  bool moved() const {
    for (std::size_t i = 0; i < at_.size(); ++i)
      if (place(tensors_[i]) != at_[i]) return true;
    return false;
  }

 private:
  static const void* place(nb::handle tensor) {
    const auto seen = described(tensor);
    return seen ? seen->data : nullptr;
  }

  std::vector<nb::object> tensors_;
  std::vector<const void*> at_;
};

}  // namespace
}  // namespace kvfold
