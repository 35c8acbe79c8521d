// Integer arithmetic of weights, as in crates/memory (law.rs, clock.rs), and the composition of updates.
#pragma once
#include "prelude.cuh"

constexpr u32 ONE = 1u << 30;  // weight 1

INLINE u32 folded(u32 potential, u32 fold) { return potential > fold ? potential - fold : 0; }
INLINE u32 weight_of(u32 potential, u32 clock) { return potential > clock ? potential - clock : 0; }

// The effect of one or several updates on a weight: x -> min(high, max(low, x + add)). Such maps compose. For f, then g:
//   g(f(x)) = min(g.high, max(g.low, min(f.high + g.add, max(f.low + g.add, x + f.add + g.add))))    (adding g.add is monotone)
//           = x + f.add + g.add, clamped to [g(f.low), g(f.high)]     (a clamp into an interval, then one into another, is a clamp
//             into the image of the first under the second, and g(f.low) <= g(f.high) since g is monotone).
// The triple represents the function, and composition of functions is associative: any bracketing gives the same integers, so a
// scan over the updates of one memory is exact. |add| <= 2^31 each and fewer than 2^32 updates keep the sum within 64 bits.
struct Clamped { i64 add; u32 low, high; };
INLINE Clamped update_by(int delta) { return {delta, 0, ONE}; }
INLINE u32 applied(const Clamped& map, i64 weight) {
  i64 moved = weight + map.add;
  return moved < (i64)map.low ? map.low : moved > (i64)map.high ? map.high : (u32)moved;
}
INLINE Clamped then(const Clamped& first, const Clamped& second) {
  return {first.add + second.add, applied(second, first.low), applied(second, first.high)};
}
INLINE Clamped unchanged() { return {0, 0, ONE}; }
