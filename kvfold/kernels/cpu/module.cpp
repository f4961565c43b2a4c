// Python bindings of the CPU kernels. Tensors cross as DLPack, whose shapes are checked, or as addresses and strides, for which
// the caller answers.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "pack.h"
#include "paged.h"
#include "step.h"

namespace nb = nanobind;
using Bytes = nb::ndarray<std::uint8_t, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const std::uint8_t, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<float, nb::c_contig, nb::device::cpu>;
using Halves = nb::ndarray<std::uint16_t, nb::c_contig, nb::device::cpu>;
using ConstFloats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;

namespace {

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

// `batch`, `heads`, `pages` and `channels` are known from the shape of `centre`; strides in elements.
void fold_channelwise(const std::string& isa, std::uintptr_t x, int dtype, std::size_t x_batch, std::size_t x_head,
                      std::size_t x_token, std::size_t page_size, std::uintptr_t order, std::size_t order_batch,
                      std::size_t order_head, ConstFloats lut, nb::bytes bits, std::size_t steps, bool lanes_are_tokens,
                      Bytes code, Halves centre, Halves scale, int threads) {
  require(centre.ndim() == 4 && lut.ndim() == 2, "centre must have the shape (batch, heads, pages, channels), lut (groups, levels)");
  kvfold::Channelwise job;
  job.x = pointer<void>(x), job.dtype = static_cast<kvfold::Dtype>(dtype);
  job.x_batch = x_batch, job.x_head = x_head, job.x_token = x_token;
  job.batch = centre.shape(0), job.heads = centre.shape(1), job.pages = centre.shape(2), job.channels = centre.shape(3);
  job.page_size = page_size, job.steps = steps, job.lanes_are_tokens = lanes_are_tokens, job.threads = threads;
  job.order = pointer<std::int16_t>(order), job.order_batch = order_batch, job.order_head = order_head;
  require(page_size && page_size % kvfold::kTile == 0, "page_size must be a multiple of 16");
  require(steps >= 1, "steps must be at least 1");
  require(bits.size() == (job.channels + kvfold::kTile - 1) / kvfold::kTile && lut.shape(0) == bits.size(),
          "bits and lut must have one entry for each group of 16 channels");
  job.bits = reinterpret_cast<const std::uint8_t*>(bits.c_str());
  std::size_t all_bits = 0;
  for (std::size_t i = 0; i < bits.size(); ++i) {
    require(job.bits[i] >= 1 && job.bits[i] <= 8 && lut.shape(1) >= (std::size_t{1} << job.bits[i]),
            "bits must be 1 to 8, and lut have 2^bits levels a group");
    all_bits += job.bits[i];
  }
  const std::size_t pages = job.batch * job.heads * job.pages;
  require(code.size() == pages * page_size * 2 * all_bits, "code must have page_size * 2 * sum(bits) bytes a page");
  require(scale.size() == centre.size(), "scale must have the shape of centre");
  job.lut = lut.data(), job.lut_stride = lut.shape(1), job.code = code.data();
  job.centre = centre.data(), job.scale = scale.data();
  const auto run = find(isa).fold_channelwise;
  nb::gil_scoped_release release;
  run(job);
}

// kvfold::Rotation over tensors that the caller keeps alive.
kvfold::Rotation matrix_rotation(std::size_t dim, std::size_t code_dim, std::uintptr_t matrix, std::uintptr_t inverse) {
  kvfold::Rotation r;
  r.kind = kvfold::RotationKind::matrix, r.dim = dim, r.code_dim = code_dim;
  r.matrix = pointer<float>(matrix), r.inverse = pointer<float>(inverse);
  return r;
}

kvfold::Rotation order_rotation(std::size_t dim, std::uintptr_t order, std::size_t batch, std::size_t head) {
  kvfold::Rotation r;
  r.kind = kvfold::RotationKind::order, r.dim = r.code_dim = dim;
  r.order = pointer<std::int16_t>(order), r.order_batch = batch, r.order_head = head;
  return r;
}

kvfold::Rotation ordered_matrix_rotation(std::size_t dim, std::uintptr_t order, std::size_t batch, std::size_t head,
                                         std::uintptr_t matrix) {
  kvfold::Rotation r = order_rotation(dim, order, batch, head);
  r.kind = kvfold::RotationKind::matrix, r.matrix = pointer<float>(matrix);
  return r;
}

kvfold::Rotation head_matrices_rotation(std::size_t dim, std::uintptr_t matrix, std::size_t head) {
  kvfold::Rotation r = matrix_rotation(dim, dim, matrix, 0);
  r.matrix_head = head;
  return r;
}

kvfold::Rotation hadamard_rotation(std::size_t dim, std::uintptr_t signs, std::uintptr_t mix) {
  kvfold::Rotation r;
  r.kind = kvfold::RotationKind::hadamard, r.dim = r.code_dim = dim, r.power = dim & (~dim + 1);
  r.signs = pointer<float>(signs), r.mix = pointer<float>(mix);
  return r;
}

// `batch`, `heads` and `pages` are known from the shape of `scale`; strides of x in elements.
void fold(const std::string& isa, std::uintptr_t x, int dtype, std::size_t x_batch, std::size_t x_head, std::size_t x_token,
          std::size_t tokens, std::size_t first, const kvfold::Rotation& rotation, ConstFloats levels, int rule,
          bool lanes_are_tokens, Bytes code, Halves scale, std::optional<Halves> centre, int threads) {
  require(scale.ndim() == 4 && levels.ndim() == 1, "scale must have the shape (batch, heads, pages, page_size)");
  kvfold::Fold job;
  job.x = pointer<void>(x), job.dtype = static_cast<kvfold::Dtype>(dtype), job.tokens = tokens, job.first = first;
  job.x_batch = x_batch, job.x_head = x_head, job.x_token = x_token;
  job.batch = scale.shape(0), job.heads = scale.shape(1), job.pages = scale.shape(2);
  job.shape.page_size = scale.shape(3), job.shape.head_dim = rotation.code_dim;
  job.shape.lanes_are_tokens = lanes_are_tokens;
  job.rotation = rotation, job.levels = levels.data(), job.rule = static_cast<kvfold::ScaleRule>(rule);
  while ((std::size_t{1} << job.bits) < levels.size()) ++job.bits;
  require(job.bits >= 1 && job.bits <= 8 && levels.size() == std::size_t{1} << job.bits, "levels must be 2 to 256, a power of two");
  require(job.shape.page_size % kvfold::kTile == 0, "page_size must be a multiple of 16");
  require(first < job.shape.page_size && first + tokens <= job.pages * job.shape.page_size, "x must fit the pages");
  const std::size_t pages = job.batch * job.heads * job.pages;
  const std::size_t tiles = (rotation.code_dim + kvfold::kTile - 1) / kvfold::kTile;
  require(code.size() == pages * job.shape.page_size * 2 * job.bits * tiles, "code must have page_size * 2 * sum(bits) bytes a page");
  job.centred = centre.has_value(), job.code = code.data(), job.scale = scale.data(), job.threads = threads;
  if (centre) {
    require(centre->size() == pages * rotation.code_dim, "centre must have code_dim numbers a page");
    require(first == 0 && tokens == job.pages * job.shape.page_size, "pages with a centre must be whole");
    job.centre = centre->data();
  }
  const auto run = find(isa).fold;
  nb::gil_scoped_release release;
  run(job);
}

// Copies each tensor (batch, heads, tokens, dim) into another from its token `first` on. Returns whether all numbers are finite
// there; nullopt, with nothing written, if kernels cannot use a tensor in place or a shape does not fit.
std::optional<bool> copy(const std::string& isa, const std::vector<std::pair<nb::object, nb::object>>& tensors, std::size_t first) {
  std::vector<kvfold::Copy> jobs;
  for (const auto& [from, to] : tensors) {
    const auto source = kvfold::numbers_of(from), target = kvfold::numbers_of(to);
    if (!source || !target) return {};
    const auto [batch, heads, tokens, dim] = source->shape;
    if (!target->has_shape(batch, heads, target->shape[2], dim) || first + tokens > target->shape[2]) return {};
    kvfold::Numbers room = *target;
    room.data = target->at(0, first);
    jobs.push_back({*source, room, batch, heads, tokens, dim});
  }
  bool finite = true;
  for (const kvfold::Copy& job : jobs) finite &= find(isa).copy(job);
  return finite;
}

using ConstInts = nb::ndarray<const std::int64_t, nb::c_contig, nb::device::cpu>;

// A layer's pool as a step reads it.
struct PagedLayer : kvfold::PagedLayer {
  Kernels kernels;
  OwnedSide own_keys, own_values;  // the sides' tables of bits and groups
  PagedLayer(const std::string& isa, const OwnedSide& key_side, const OwnedSide& value_side, const kvfold::Rotation& of_keys,
             const kvfold::Rotation& of_values, std::size_t heads, std::size_t repeats, std::size_t key_channels,
             std::size_t value_channels, float scale, float cap, std::uintptr_t logits, int tail_dtype,
             std::uintptr_t key_tails, std::uintptr_t value_tails, std::uintptr_t dense_keys, std::uintptr_t dense_values)
      : kernels(find(isa)), own_keys(key_side), own_values(value_side) {
    keys = own_keys.view(), values = own_values.view(), key_rotation = of_keys, value_rotation = of_values;
    kv_heads = heads, repeat = repeats, key_dim = key_channels, value_dim = value_channels;
    scaling = scale, softcap = cap, sink_logits = pointer<float>(logits), dtype = static_cast<kvfold::Dtype>(tail_dtype);
    tail_keys = reinterpret_cast<char*>(key_tails), tail_values = reinterpret_cast<char*>(value_tails);
    first_keys = pointer<char>(dense_keys), first_values = pointer<char>(dense_values);
  }
  PagedLayer(const PagedLayer&) = delete;  // its sides point into it
};

kvfold::PagedStep paged_step(ConstInts rows, ConstInts page_at, std::size_t page_size) {
  require(rows.ndim() == 2 && rows.shape(1) == 8, "rows must have the shape (sequences, 8)");
  require(page_at.ndim() == 2 && page_at.shape(0) == rows.shape(0), "page_at must have the shape (sequences, pages)");
  std::vector<kvfold::PagedRow> own;
  for (std::size_t i = 0; i < rows.shape(0); ++i) {
    const std::int64_t* row = rows.data() + 8 * i;
    own.push_back({row[0], row[1], row[2], row[3], row[4], {row[5], row[6]}, row[7]});
    require(row[0] >= 0 && row[1] >= 1 && row[2] >= row[1], "a row has at least one new token");
    const auto size = static_cast<std::int64_t>(page_size);
    require((row[2] - 1) / size <= static_cast<std::int64_t>(page_at.shape(1)), "page_at must name every page that is read");
    require(row[3] >= 0 || (row[2] - row[1]) % size == 0, "a row that goes on in an unfinished page needs its slot");
    for (std::int64_t page = row[4]; page * size < row[2]; ++page)
      require(page - row[4] < 2 && row[5 + page - row[4]] >= 0, "tokens that stay dense need slots, in two pages at most");
  }
  return kvfold::PagedStep(std::move(own), std::vector<std::int64_t>(page_at.data(), page_at.data() + page_at.size()),
                           page_at.shape(1), page_size);
}

// Addresses and strides, in elements, of (tokens, heads, dim).
std::vector<std::size_t> paged_attend(const kvfold::PagedStep& step, const PagedLayer& layer, std::uintptr_t query, std::size_t query_token,
                  std::size_t query_head, std::uintptr_t key, std::size_t key_token, std::size_t key_head,
                  std::uintptr_t value, std::size_t value_token, std::size_t value_head, std::uintptr_t out, int threads) {
  nb::gil_scoped_release release;
  return step.attend(layer, layer.kernels.attend, {pointer<char>(query), query_token, query_head},
                     {pointer<char>(key), key_token, key_head}, {pointer<char>(value), value_token, value_head},
                     reinterpret_cast<float*>(out), threads);
}

}  // namespace

NB_MODULE(_cpu, m) {
  nb::set_leak_warnings(false);  // caches that a script still holds when it ends are no leak
  m.def("instruction_sets", &instruction_sets);
  m.def("in_integers", [](const std::string& isa, const OwnedSide& side) { return find(isa).in_integers(side.view()); });
  nb::class_<OwnedSide>(m, "Side")
      .def(nb::init<std::uintptr_t, std::size_t, std::size_t, std::size_t, std::size_t, nb::bytes, bool, std::uintptr_t,
                    std::size_t, bool, bool>())
      .def("set_first_channels", &OwnedSide::set_first_channels)
      .def("set_scale", &OwnedSide::set_scale)
      .def("set_plain", &OwnedSide::set_plain)
      .def("set_centre", &OwnedSide::set_centre);
  nb::class_<kvfold::Rotation>(m, "Rotation")
      .def_static("matrix", &matrix_rotation)
      .def_static("order", &order_rotation)
      .def_static("ordered_matrix", &ordered_matrix_rotation)
      .def_static("head_matrices", &head_matrices_rotation)
      .def_static("hadamard", &hadamard_rotation);
  nb::class_<kvfold::Addresses>(m, "Addresses")
      .def(nb::init<std::vector<nb::object>>())
      .def("moved", &kvfold::Addresses::moved);
  nb::class_<Rows, kvfold::Addresses>(m, "Rows")
      .def(nb::init<const std::string&, const OwnedSide&, const OwnedSide&, const kvfold::Rotation&, const kvfold::Rotation&,
                    std::size_t, std::size_t, std::size_t, std::size_t, std::int64_t, std::vector<nb::object>>())
      .def("attend", nb::overload_cast<nb::handle, nb::handle, float, std::size_t, const std::vector<std::int64_t>&,
                                       const std::optional<GivenSpan>&, const std::optional<GivenSpan>&, const std::optional<MaskAt>&,
                                       float, std::uintptr_t, int>(&Rows::attend, nb::const_));
  m.def("copy", &copy);
  nb::class_<PagedLayer>(m, "PagedLayer")
      .def(nb::init<const std::string&, const OwnedSide&, const OwnedSide&, const kvfold::Rotation&, const kvfold::Rotation&,
                    std::size_t, std::size_t, std::size_t, std::size_t, float, float, std::uintptr_t, int, std::uintptr_t,
                    std::uintptr_t, std::uintptr_t, std::uintptr_t>());
  nb::class_<kvfold::PagedStep>(m, "PagedStep").def("attend", &paged_attend);
  m.def("paged_step", &paged_step);
  nb::class_<TokenSide>(m, "TokenSide")
      .def(nb::init<const kvfold::Rotation&, std::uintptr_t, unsigned, int, bool, std::size_t, std::uintptr_t, std::size_t,
                    std::size_t, std::uintptr_t, std::size_t, std::size_t>());
  m.def("fold_token", &fold_token);
  auto step = nb::class_<Step, kvfold::Addresses>(m, "Step");
  step.def(nb::init<const Rows&, std::int64_t, std::int64_t, std::size_t, const std::optional<GivenSpan>&, const std::optional<GivenSpan>&,
                    const std::vector<Step::Fold>&, std::vector<nb::object>>(),
           nb::keep_alive<1, 2>())
      .def("append", &Step::append)
      .def("attend", &Step::attend);
  step.attr("backend") = "cpu";  // as kvfold/attention/dispatch.py asks for it
  m.def("pack", &pack);
  m.def("unpack", &unpack);
  m.def("unpack_levels", &unpack_levels);
  m.def("fold_channelwise", &fold_channelwise);
  m.def("fold", &fold, nb::arg("isa"), nb::arg("x"), nb::arg("dtype"), nb::arg("x_batch"), nb::arg("x_head"),
        nb::arg("x_token"), nb::arg("tokens"), nb::arg("first"), nb::arg("rotation"), nb::arg("levels"), nb::arg("rule"),
        nb::arg("lanes_are_tokens"), nb::arg("code"), nb::arg("scale"), nb::arg("centre").none(), nb::arg("threads"));
}
