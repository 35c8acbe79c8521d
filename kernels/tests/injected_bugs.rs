//! Kernels under sanitizers, and with injected bugs: each must be detected with the expected message.
//!
//! All are `full` tests, since sanitizers are slow: `cargo xtask kernels --check` and CI run them.
#![allow(clippy::unwrap_used)] // Test helpers.

mod host;
mod pass_checks;
mod random_numbers;
mod reference_device;

use host::{Host, InjectedBug, Variant, program};
use pass_checks::{PARTS, Part, PassChecks};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

fn pass_checks(program: &Path, variant: Variant) -> PassChecks<Host> {
    let host = Host::start(program, None);
    match variant {
        // A CUDA thread costs a third of a millisecond under ThreadSanitizer.
        Variant::Races => PassChecks::new(host, 7, &[1_400, 200, 150, 70], true),
        _ => PassChecks::new(host, 7, &[4_096, 4_096, 3_000, 600], false),
    }
}

#[test]
#[ignore = "full: a sanitizer build"]
fn passes_access_only_their_own_memory() {
    let Some(program) = program(Variant::Addresses, None) else { return };
    let mut pass_checks = pass_checks(&program, Variant::Addresses);
    PARTS.into_iter().chain(PARTS).for_each(|part| pass_checks.check(part));
}

#[test]
#[ignore = "full: a sanitizer build"]
fn threads_of_a_pass_do_not_race() {
    let Some(program) = program(Variant::Races, None) else { return };
    let mut pass_checks = pass_checks(&program, Variant::Races);
    PARTS.into_iter().for_each(|part| pass_checks.check(part));
}

/// (file, original, replacement, pass that detects it, expected message)
type BugCase = (&'static str, &'static str, &'static str, Part, &'static str);

/// Asserts that every bug is detected with its message.
fn all_are_reported(variant: Variant, bugs: &[BugCase]) {
    for &(file, original, replacement, part, expected) in bugs {
        let Some(program) = program(variant, Some(&InjectedBug { file, original, replacement })) else { return };
        let outcome = catch_unwind(AssertUnwindSafe(|| pass_checks(&program, variant).check(part)));
        let message = outcome.expect_err(&format!("bug was not detected in {file}: {replacement}"));
        let constant = message.downcast_ref::<&str>().copied().map(str::to_owned);
        let message = message.downcast_ref::<String>().cloned().or(constant).unwrap_or_default();
        assert!(message.contains(expected), "{file}: {replacement}: expected '{expected}', got: {message}");
        println!("reported ({expected}): {file}: {}", replacement.trim());
    }
}

#[test]
#[ignore = "full: compiles a kernel for each bug"]
fn wrong_results_and_divergent_barriers_are_detected() {
    all_are_reported(
        Variant::Plain,
        &[
            (
                "laws.cuh",
                "applied(second, first.low), applied(second, first.high)}",
                "applied(first, second.low), applied(first, second.high)}",
                Part::Update,
                "an update differs",
            ),
            (
                "laws.cuh",
                "return {first.add + second.add, applied(second, first.low), applied(second, first.high)};",
                "return {first.add + second.add, 0, ONE};",
                Part::Update,
                "an update differs",
            ),
            (
                "update.cu",
                "weight_of(potential[at], clock));",
                "(i64)potential[at] - (i64)clock);",
                Part::Update,
                "an update differs",
            ),
            (
                "epoch.cu",
                "drawn[j].order < drawn[me].order",
                "drawn[j].order > drawn[me].order",
                Part::Epoch,
                "an epoch differs",
            ),
            (
                "quality.cuh",
                "if (segment.fold && !(touched && touched[place >> 5] >> (place & 31) & 1))",
                "if (segment.fold && (!touched || touched))",
                Part::Epoch,
                "an epoch differs",
            ),
            (
                "group.cu",
                "folded(potential[slot], segment.fold);",
                "potential[slot];",
                Part::Groups,
                "an update of groups differs",
            ),
            (
                "rank.cu",
                "ONE - weight_of(potential[at], its.clock);",
                "ONE - min(potential[at], ONE);",
                Part::Rank,
                "a rank differs",
            ),
            (
                "select.cu",
                "return reverse ? ~key : key;",
                "(void)reverse; return key;",
                Part::Few,
                "the first few differs",
            ),
            ("digest.cu", "sum.high + (before + sum.low < before)", "sum.high", Part::Digest, "a digest differs"),
            (
                "index.cu",
                "atomicExch(&entry[at], ERASED);",
                "atomicExch(&entry[at], EMPTY);",
                Part::Index,
                "index lookup differs",
            ),
            (
                "sample.cu",
                "share.before + (drawn - share.offset)",
                "drawn - share.offset",
                Part::Sample,
                "draws differ",
            ),
            (
                "recall.cu",
                "for (u32 o = 16; o > 0; o >>= 1) sum",
                "for (u32 o = 1; o < 32; o <<= 1) sum",
                Part::Recall,
                "recall differs",
            ),
            (
                "algebra.cu",
                "const float none = __uint_as_float(0xff800000u);",
                "const float none = -3.4e38f;",
                Part::MaxPlus,
                "a max-plus product differs",
            ),
            (
                "algebra.cu",
                "row <= column && column < size",
                "row < column && column < size",
                Part::OuterProducts,
                "sums of outer products differ",
            ),
            (
                "algebra.cu",
                "sum[i][j] + factor * value[j];",
                "sum[i][j] + (float)factor * (float)value[j];",
                Part::OuterProducts,
                "sums of outer products differ",
            ),
            (
                "geodesic.cu",
                "from = threadIdx.x / SECOND * HALF;",
                "from = threadIdx.x / SECOND * (HALF - 1);",
                Part::Networks,
                "differ",
            ),
            (
                "geodesic.cu",
                "double signed_length = source < target ? length : -length;",
                "double signed_length = length;",
                Part::Paths,
                "path features differ",
            ),
            ("neural.cu", "low_key += 0x9E3779B9u;", "low_key += 0x9E3779B8u;", Part::Training, "differs"),
            (
                "neural.cu",
                "u32 from = part * each, to = min(from + each, rows);",
                "u32 from = part * each, to = min(from + each, rows - 1);",
                Part::Training,
                "a gradient of a network differs",
            ),
            (
                "neural.cu",
                "inverse * (to[i] * weight[i] - sum - (own[i] - mean) * inverse * dot);",
                "inverse * (to[i] * weight[i] - (own[i] - mean) * inverse * dot);",
                Part::Training,
                "a gradient of a network differs",
            ),
            (
                "group.cu",
                "    u32 peers = __match_any_sync(ALL_LANES, rule);",
                "    if (!used) continue;\n    u32 peers = __match_any_sync(ALL_LANES, rule);",
                Part::Groups,
                "DEADLOCK",
            ),
            (
                "update.cu",
                "  if (lane_of() == 0) before = nothing();\n  __syncthreads();",
                "  if (lane_of() == 0) { before = nothing(); __syncthreads(); }\n  else __syncthreads();",
                Part::Update,
                "divergent barrier",
            ),
        ],
    );
}

#[test]
#[ignore = "full: compiles a kernel for each bug"]
fn out_of_bounds_accesses_are_detected() {
    all_are_reported(
        Variant::Addresses,
        &[
            (
                "epoch.cu",
                "  if (place < BUCKET) bucket[(size_t)tile * BUCKET + place] = {slot[i], i, delta[i]};\n  else atomicExch(overflow, 1u);",
                "  bucket[(size_t)tile * BUCKET + place] = {slot[i], i, delta[i]};\n  (void)overflow;",
                Part::HotEpoch,
                "heap-buffer-overflow",
            ),
            (
                "algebra.cu",
                "row < rows && step < depth ? left[(size_t)row * depth + step] : none",
                "left[(size_t)row * depth + step]",
                Part::MaxPlus,
                "heap-buffer-overflow",
            ),
            (
                "neural.cu",
                "step < to && row < rows ? left[LEFT_TRANSPOSED",
                "step < to ? left[LEFT_TRANSPOSED",
                Part::Training,
                "heap-buffer-overflow",
            ),
            ("sort.cu", "    if (i < n) exchange[place[j]]", "    exchange[place[j]]", Part::Rank, "AddressSanitizer"),
            (
                "rows.cu",
                "  if (i >= n) return;\n  potential[slots[i]]",
                "  (void)n;\n  potential[slots[i]]",
                Part::Read,
                "heap-buffer-overflow",
            ),
            (
                "sort.cu",
                "__shared__ u32 own[4][DIGITS];",
                "__shared__ u32 own[3][DIGITS];",
                Part::Update,
                "out of bounds",
            ),
        ],
    );
}

#[test]
#[ignore = "full: compiles a kernel for each bug"]
fn races_are_detected() {
    all_are_reported(
        Variant::Races,
        &[
            (
                "sort.cu",
                "    place[j] = before + __popc(peers & ((1u << lane) - 1));\n  }\n  __syncthreads();",
                "    place[j] = before + __popc(peers & ((1u << lane) - 1));\n  }",
                Part::Update,
                "data race",
            ),
            (
                "epoch.cu",
                "bucket[(size_t)index * BUCKET + me];\n  __syncthreads();",
                "bucket[(size_t)index * BUCKET + me];",
                Part::Epoch,
                "data race",
            ),
            (
                "update.cu",
                "    store_release(&status[tile], UP_TO_HERE);",
                "    __atomic_store_n(&status[tile], UP_TO_HERE, __ATOMIC_RELAXED);",
                Part::Update,
                "data race",
            ),
            (
                "quality.cuh",
                "atomicAdd(&total->count, sums.count[g]);",
                "total->count += sums.count[g];",
                Part::Quality,
                "data race",
            ),
            (
                "neural.cu",
                "    __syncthreads();\n    // The next tiles arrive",
                "    // The next tiles arrive",
                Part::Training,
                "data race",
            ),
            (
                "index.cu",
                "if (atomicCAS(&entry[at], EMPTY, slot) == EMPTY) return;",
                "if (entry[at] == EMPTY) { entry[at] = slot; return; }",
                Part::Index,
                "data race",
            ),
            (
                "algebra.cu",
                "best[i][j] = max(best[i][j], weight[i] + value[j]);\n    }\n    __syncthreads();",
                "best[i][j] = max(best[i][j], weight[i] + value[j]);\n    }",
                Part::MaxPlus,
                "data race",
            ),
        ],
    );
}
