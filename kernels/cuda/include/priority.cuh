// Exact functions of prioritized sampling, as in src/priority.rs, which also computes the table.
#pragma once
#include "laws.cuh"

// Knots at 0 to 255, then 128 per power of two up to ONE; the last priority is repeated.
constexpr u32 KNOTS = 3073;
INLINE u32 priority_of(const u32* __restrict__ table, u32 weight) {
  u32 shift = weight < 256 ? 0 : 24 - __clz((int)weight);
  u32 i = (shift << 7) + (weight >> shift), part = weight & ((1u << shift) - 1);
  return table[i] + (u32)((u64)(table[i + 1] - table[i]) * part >> shift);
}

// floor((k * total + floor(random * total / 2^64)) / draws), in [0, total): total < 2^62.
INLINE u64 threshold(u32 k, u32 draws, u64 random, u64 total) {
  return (u64)(((unsigned __int128)k * total + (u64)((unsigned __int128)random * total >> 64)) / draws);
}

// Philox4x32-10 (Salmon et al., 2011) with key = seed and counter = (k, 0, step): its first two words.
INLINE u64 random_u64(u64 seed, u64 step, u32 k) {
  u32 c[4] = {k, 0, (u32)step, (u32)(step >> 32)}, low = (u32)seed, high = (u32)(seed >> 32);
#pragma unroll
  for (u32 round = 0; round < 10; round++, low += 0x9E3779B9u, high += 0xBB67AE85u) {
    u64 a = (u64)0xD2511F53u * c[0], b = (u64)0xCD9E8D57u * c[2];
    u32 next[4] = {(u32)(b >> 32) ^ c[1] ^ low, (u32)b, (u32)(a >> 32) ^ c[3] ^ high, (u32)a};
    for (u32 i = 0; i < 4; i++) c[i] = next[i];
  }
  return (u64)c[1] << 32 | c[0];
}
