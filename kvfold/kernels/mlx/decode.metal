// One decoding step over folded pages: the page form's scores, an online softmax, and weighted sums of codes.
//
// A threadgroup takes the query heads of one KV head through its share of the pages. A thread is a token while scores
// are made, then a channel while values are summed. What follows `---` is the body of the kernel; MLX writes its
// signature, in which inputs of few elements are `constant` and others `device`, so no pointer to a small input is taken.
// Constants that start with K_ and V_ are of keys and values and come before this text.

// Codes of one lane of a 16 x 16 tile, 16 steps; kvfold/quant/packing.py says where bits lie.
inline void codes_of(const device uint8_t* tile, int bits, int lane, thread uint8_t* codes) {
  for (int i = 0; i < 16; ++i) codes[i] = 0;
  int shift = 0;
  for (int width = 8; width >= 2; width /= 2) {
    if ((bits & width) == 0) continue;
    const int fields = 8 / width, mask = (1 << width) - 1;
    for (int v = 0; v < width / 2; ++v) {
      for (int j = 0; j < 4; ++j) {
        const int byte = tile[64 * v + 4 * lane + j];
        for (int k = 0; k < fields; ++k) codes[4 * (v * fields + k) + j] |= ((byte >> (k * width)) & mask) << shift;
      }
    }
    tile += 32 * width;
    shift += width;
  }
  if ((bits & 1) != 0) {
    for (int j = 0; j < 4; ++j) {
      const int slot = 4 * lane + j, byte = tile[slot % 32];
      for (int f = 0; f < 4; ++f) codes[4 * f + j] |= ((byte >> (f + 4 * (slot / 32))) & 1) << shift;
    }
  }
}
---
const int t = thread_position_in_threadgroup.x;
const int lane = t % 32, simdgroup = t / 32;
const int split = threadgroup_position_in_grid.x, unit = threadgroup_position_in_grid.y;
const int pages = sizes[0], tokens = sizes[1], splits = sizes[2], room = sizes[3];
threadgroup float scaled[REPEAT * K_DIM], sums[REPEAT * K_GROUPS], p[REPEAT * PAGE], part[REPEAT * SIMDGROUPS];
float acc[REPEAT * CHANNELS], maximum[REPEAT], total[REPEAT];
for (int i = 0; i < REPEAT * CHANNELS; ++i) acc[i] = 0;
for (int r = 0; r < REPEAT; ++r) {
  maximum[r] = -INFINITY;
  total[r] = 0;
}
const device float* query = q + unit * REPEAT * K_DIM;
for (int i = t; i < REPEAT * K_GROUPS; i += THREADS) {  // for offsets of tokens
  float sum = 0;
  for (int c = K_FIRST[i % K_GROUPS]; c < K_FIRST[i % K_GROUPS + 1]; ++c) sum += query[i / K_GROUPS * K_DIM + c];
  sums[i] = sum;
}
const int share = (pages + splits - 1) / splits, last = min(pages, (split + 1) * share);
for (int page = split * share; page < last; ++page) {
  const size_t at = size_t(unit) * room + page;

  // Scores, a token a thread.
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = t; i < REPEAT * K_DIM; i += THREADS)
    scaled[i] = query[i] * (K_CHANNEL_SCALE ? float(k_channel_scale[at * K_DIM + i % K_DIM]) : 1.0f);
  for (int r = 0; r < REPEAT; ++r) {
    float x = 0;
    for (int c = t; c < K_CENTRE; c += THREADS) x += query[r * K_DIM + c] * float(k_centre[at * K_CENTRE + c]);
    x = simd_sum(x);
    if (lane == 0) part[r * SIMDGROUPS + simdgroup] = x;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int token = t; token < PAGE; token += THREADS) {
    float score[REPEAT], dot[REPEAT];
    for (int r = 0; r < REPEAT; ++r) {
      score[r] = dot[r] = 0;
      float centre = 0;
      for (int i = 0; i < SIMDGROUPS; ++i) centre += part[r * SIMDGROUPS + i];
      (K_SCALED_SHIFTS ? dot : score)[r] = centre;
    }
    const device uint8_t* row = k_code + at * K_BYTES + token / 16 * (K_BYTES * 16 / PAGE);
    int group = 0;
    for (int tile = 0; tile < K_TILES; ++tile) {
      uint8_t codes[16];
      codes_of(row, K_BITS[tile], token % 16, codes);
      row += 32 * K_BITS[tile];
      for (int i = 0; i < 16 && 16 * tile + i < K_DIM; ++i) {
        const float level = k_lut[tile * K_LEVELS + codes[i]];
        for (int r = 0; r < REPEAT; ++r) dot[r] += scaled[r * K_DIM + 16 * tile + i] * level;
      }
      if (16 * tile + 16 < K_FIRST[group + 1]) continue;
      const size_t own = (at * PAGE + token) * K_GROUPS + group;
      for (int r = 0; r < REPEAT; ++r) {
        score[r] += dot[r] * (K_SCALE ? float(k_scale[own]) : 1.0f);
        if (K_OFFSET) score[r] += sums[r * K_GROUPS + group] * float(k_offset[own]);
        dot[r] = 0;
      }
      ++group;
    }
    const bool held = page * PAGE + token < tokens;
    for (int r = 0; r < REPEAT; ++r) p[r * PAGE + token] = held ? score[r] : -INFINITY;
  }

  // Probabilities.
  float decay[REPEAT], weight[REPEAT];
  for (int r = 0; r < REPEAT; ++r) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float x = -INFINITY;
    for (int token = t; token < PAGE; token += THREADS) x = max(x, p[r * PAGE + token]);
    x = simd_max(x);
    if (lane == 0) part[simdgroup] = x;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float highest = maximum[r];
    for (int i = 0; i < SIMDGROUPS; ++i) highest = max(highest, part[i]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    decay[r] = exp(maximum[r] - highest);
    maximum[r] = highest;
    x = 0;
    for (int token = t; token < PAGE; token += THREADS) {
      const float e = exp(p[r * PAGE + token] - highest);
      p[r * PAGE + token] = e;
      x += e;
    }
    x = simd_sum(x);
    if (lane == 0) part[simdgroup] = x;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    weight[r] = 0;
    for (int i = 0; i < SIMDGROUPS; ++i) weight[r] += part[i];
    total[r] = total[r] * decay[r] + weight[r];
  }

  // Values, a channel a thread.
  for (int n = 0; n < CHANNELS; ++n) {
    const int c = t + n * THREADS;
    if (c >= V_DIM) continue;
    const int tile = c / 16;
    int group = 0;
    while (c >= V_FIRST[group + 1]) ++group;
    float sum[REPEAT];
    for (int r = 0; r < REPEAT; ++r) sum[r] = 0;
    const float centre = c < V_CENTRE ? float(v_centre[at * V_CENTRE + c]) : 0.0f, inner = V_SCALED_SHIFTS ? centre : 0.0f;
    const float wide = V_CHANNEL_SCALE ? float(v_channel_scale[at * V_DIM + c]) : 1.0f;
    const device uint8_t* column = v_code + at * V_BYTES + V_START[tile] * (PAGE / 16);
    for (int block = 0; block < PAGE / 16; ++block) {
      uint8_t codes[16];
      codes_of(column + block * 32 * V_BITS[tile], V_BITS[tile], c % 16, codes);
      for (int i = 0; i < 16; ++i) {
        const int token = 16 * block + i;
        const size_t own = (at * PAGE + token) * V_GROUPS + group;
        float value = wide * v_lut[tile * V_LEVELS + codes[i]] + inner;
        if (V_SCALE) value *= float(v_scale[own]);
        if (V_OFFSET) value += float(v_offset[own]) * (V_SCALED_SHIFTS ? wide : 1.0f);
        for (int r = 0; r < REPEAT; ++r) sum[r] += p[r * PAGE + token] * value;
      }
    }
    for (int r = 0; r < REPEAT; ++r)
      acc[r * CHANNELS + n] = acc[r * CHANNELS + n] * decay[r] + sum[r] + weight[r] * (centre - inner);
  }
}
for (int r = 0; r < REPEAT; ++r) {
  const int own = (unit * splits + split) * REPEAT + r;
  if (t == 0) {
    out_maximum[own] = maximum[r];
    out_total[own] = total[r];
  }
  for (int n = 0; n < CHANNELS; ++n)
    if (t + n * THREADS < V_DIM) out_sum[own * V_DIM + t + n * THREADS] = acc[r * CHANNELS + n];
}
