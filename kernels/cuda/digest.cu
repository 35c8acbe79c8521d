// Order-independent digest: a wrapping 128-bit sum of one hash per memory, as in crates/memory/src/hash.rs.
#include "laws.cuh"

struct Wide { u64 low, high; };
INLINE Wide plus(Wide a, Wide b) {
  u64 low = a.low + b.low;
  return {low, a.high + b.high + (low < b.low)};
}

// XXH3-128 (Collet), seed 0, of exactly 32 bytes: the path for 17 to 128 bytes, one round, with the words of the default secret.
INLINE u64 folded_product(u64 a, u64 b) {
  unsigned __int128 product = (unsigned __int128)a * b;
  return (u64)product ^ (u64)(product >> 64);
}
INLINE u64 avalanche(u64 x) {
  x = (x ^ x >> 37) * 0x165667919E3779F9ull;
  return x ^ x >> 32;
}
INLINE Wide hash_of_record(u64 a, u64 b, u64 c, u64 d) {
  constexpr u64 P1 = 0x9E3779B185EBCA87ull, P2 = 0xC2B2AE3D27D4EB4Full, P4 = 0x85EBCA77C2B2AE63ull, LENGTH = 32;
  u64 low = LENGTH * P1 + folded_product(a ^ 0xbe4ba423396cfeb8ull, b ^ 0x1cad21f72c81017cull);
  low ^= c + d;
  u64 high = folded_product(c ^ 0xdb979083e96dd4deull, d ^ 0x1f67b3b7a4a44072ull);
  high ^= a + b;
  return {avalanche(low + high), 0 - avalanche(low * P1 + high * P4 + LENGTH * P2)};
}

// Adds the digest of every segment to `out`, which is initially zero. `content` (low and high half by slot) may be null: all are 0 then.
KERNEL digest(const u32* __restrict__ potential, const u8* __restrict__ group, const u64* __restrict__ id, const Wide* __restrict__ content, const Segment* __restrict__ segments, const Tile* __restrict__ tiles, Wide* out) {
  Tile tile = tiles[blockIdx.x];
  if (tile.count == 0) return;
  u32 clock = segments[tile.segment].clock;
  Wide sum = {0, 0};
  for (u32 i = threadIdx.x; i < tile.count; i += THREADS) {
    u32 slot = blockIdx.x * TILE + i;
    Wide carried = content ? content[slot] : Wide{0, 0};
    sum = plus(sum, hash_of_record(id[slot], (u64)group[slot] << 32 | weight_of(potential[slot], clock), carried.low, carried.high));
  }
  for (u32 o = 16; o > 0; o >>= 1) {
    Wide other;
    other.low = __shfl_down_sync(ALL_LANES, sum.low, o);
    other.high = __shfl_down_sync(ALL_LANES, sum.high, o);
    sum = plus(sum, other);
  }
  if (lane_of() > 0) return;
  // The low half wraps floor(total / 2^64) times in any order: its previous value shows whether this addition carried.
  u64 before = atomicAdd(&out[tile.segment].low, sum.low);
  atomicAdd(&out[tile.segment].high, sum.high + (before + sum.low < before));
}

CUDA_HOST_KERNEL(digest)
