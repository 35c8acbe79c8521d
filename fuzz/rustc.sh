#!/bin/sh
# RUSTC_WORKSPACE_WRAPPER of `cargo xtask fuzz`: compiles the workspace's own crates with libFuzzer coverage of edges and comparisons, and with
# debug assertions. Other crates are those of the release build, which saves rebuilding them.
#
# Works on the pinned stable compiler: the pass is LLVM's, and no sanitizer is linked. One codegen unit, since otherwise the linker drops entries
# of the counter tables. CI fuzzes for seconds but compiles for minutes, so it optimizes less.
if [ -n "${CI-}" ]; then level=1; else level=2; fi
case " $* " in
    # Build scripts run without libFuzzer, which provides the counters.
    *" --crate-name build_script_"*) exec "$@" ;;
esac
exec "$@" \
    -Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares \
    -Ccodegen-units=1 -Copt-level=$level -Cdebug-assertions=on -Coverflow-checks=on
