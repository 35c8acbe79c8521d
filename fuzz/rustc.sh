#!/bin/sh
# RUSTC_WORKSPACE_WRAPPER of `cargo xtask fuzz`: compiles the workspace's own crates so that libFuzzer sees which edges an input
# takes and what it was compared with, and with the checks of a debug build. The crates of others stay as the release build has
# them, which saves building them again.
#
# Works on the pinned stable compiler: the pass is LLVM's, and no sanitizer is linked. One codegen unit, or the tables of
# counters and of their places lose entries on the way through the linker. CI runs targets for seconds, and compiles for
# minutes: few optimisations there.
if [ -n "${CI-}" ]; then level=1; else level=2; fi
case " $* " in
    # A build script runs by itself, without libFuzzer to take the counts.
    *" --crate-name build_script_"*) exec "$@" ;;
esac
exec "$@" \
    -Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares \
    -Ccodegen-units=1 -Copt-level=$level -Cdebug-assertions=on -Coverflow-checks=on
