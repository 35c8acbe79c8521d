#!/bin/sh
# RUSTC_WORKSPACE_WRAPPER of `cargo xtask simulate`: compiles the workspace's own crates with every assertion on. The crates of
# others stay as the release build has them, which saves building them again.
case " $* " in
    *" --crate-name build_script_"*) exec "$@" ;;
esac
exec "$@" -Cdebug-assertions=on -Coverflow-checks=on
