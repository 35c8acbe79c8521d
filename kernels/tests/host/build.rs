//! Compiles the kernels for the CPU. Objects are cached by the hash of their sources, so that a change recompiles only what it affects.

use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock};

/// Instrumentation of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(dead_code)] // Not every test has sanitizers.
pub(crate) enum Variant {
    /// None.
    Plain,
    /// AddressSanitizer and UBSan.
    Addresses,
    /// ThreadSanitizer.
    Races,
    /// None, as a library: the emulated CUDA driver.
    Library,
}

/// An injected bug: in this file, `original`, which occurs once, is replaced.
#[derive(Debug, Clone, Copy)]
#[allow(dead_code)] // Not every test injects bugs.
pub(crate) struct InjectedBug {
    pub(crate) file: &'static str,
    pub(crate) original: &'static str,
    pub(crate) replacement: &'static str,
}

impl Variant {
    fn flags(self) -> &'static [&'static str] {
        match self {
            Self::Plain => &["-O2"],
            Self::Library => &["-O2", "-fPIC", "-fvisibility=hidden"],
            Self::Addresses => {
                &["-O1", "-g1", "-DSHIM_ASAN", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
            }
            Self::Races => &["-O1", "-g1", "-fsanitize=thread"],
        }
    }

    /// Flags for the runtime, whose own bookkeeping is excluded from race detection.
    fn runtime_flags(self) -> &'static [&'static str] {
        match self {
            Self::Races => &["-O1", "-g1", "-DSHIM_TSAN"],
            _ => self.flags(),
        }
    }
}

/// Returns the directory of the kernels, from the tests of any package.
fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let own = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut above = own.ancestors().map(|folder| folder.join("kernels"));
        above
            .find(|folder| folder.join("host/libcuda.cpp").exists())
            .expect("the tests run in a package of the workspace")
    })
}

/// Source of the emulated NCCL.
const NCCL_SOURCE: &str = "host/libnccl.cpp";

/// Returns the emulated NCCL for an emulated driver.
///
/// # Panics
/// When compilation fails.
#[allow(dead_code)] // Not every test sums over GPUs.
pub(crate) fn nccl(driver: &Path) -> PathBuf {
    let _one = BUILDING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "g++".to_owned());
    let hash = short_hash(&[sources()[NCCL_SOURCE].clone(), driver.display().to_string(), compiler.clone()]);
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("kernels-on-cpu/libnccl-{hash}"));
    let library = out.join("libnccl.so.2");
    if !library.exists() {
        fs::create_dir_all(&out).unwrap();
        let made = library.with_extension(format!("{}", std::process::id()));
        let mut command = Command::new(&compiler);
        command.current_dir(folder()).args(["-std=c++17", "-pthread", "-Wall", "-Wextra", "-Werror", "-shared"]);
        command.args(Variant::Library.flags()).arg(NCCL_SOURCE).arg(driver).arg("-o").arg(&made);
        run(&mut command);
        // The loader looks for the driver under the name that it has recorded.
        let _ = std::os::unix::fs::symlink(driver, out.join("libcuda.so.1"));
        fs::rename(&made, &library).unwrap();
    }
    library
}

/// Serializes builds: tests that need the same program find it built.
static BUILDING: Mutex<()> = Mutex::new(());

/// Returns the program of host/serve.cpp (or the library of host/libcuda.cpp) with all kernels and optionally a bug; `None`, with a message, on a
/// machine without g++.
///
/// # Panics
/// When compilation fails; without g++ if the environment has `CI`.
pub(crate) fn program(variant: Variant, bug: Option<&InjectedBug>) -> Option<PathBuf> {
    let _one = BUILDING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "g++".to_owned());
    if Command::new(&compiler).arg("--version").output().is_err() {
        assert!(std::env::var_os("CI").is_none(), "CI runs the kernels, and there is no {compiler}");
        use std::io::Write as _;
        // Not by eprintln, which the test harness captures. `cargo xtask test` counts the line.
        let line = format!("skipped: no {compiler} to compile the kernels for the CPU (CXX names another)\n");
        std::io::stderr().write_all(line.as_bytes()).unwrap();
        return None;
    }
    let library = variant == Variant::Library;
    let mut files = sources();
    files.remove(if library { "host/serve.cpp" } else { "host/libcuda.cpp" });
    files.remove(NCCL_SOURCE);
    if let Some(bug) = bug {
        let text = files.iter_mut().find(|(name, _)| is_file(name, bug.file)).unwrap().1;
        assert_eq!(text.matches(bug.original).count(), 1, "{bug:?} must occur exactly once");
        *text = text.replace(bug.original, bug.replacement);
    }
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels-on-cpu");
    fs::create_dir_all(&out).unwrap();
    // Reports then name files of the checkout, or of the modified copy.
    let from = bug.map_or_else(|| folder().to_owned(), |_| copy(&out, &files));

    let names: Vec<_> = files.keys().filter(|name| name.ends_with(".cu") || name.ends_with(".cpp")).collect();
    let objects = Mutex::new(Vec::new());
    let next = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(name) = names.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)) {
                    let object = compile(&compiler, variant, name, &files, &from, &out);
                    objects.lock().unwrap().push(object);
                }
            });
        }
    });
    let mut objects = objects.into_inner().unwrap();
    objects.sort();
    let hash = short_hash(&[format!("{objects:?}{:?}", variant.flags())]);
    // The loader finds a library by its name, in its own directory.
    let program = if library {
        out.join(format!("libcuda-{hash}")).join("libcuda.so")
    } else {
        out.join(format!("serve-{hash}"))
    };
    if !program.exists() {
        fs::create_dir_all(program.parent().unwrap()).unwrap();
        let made = program.with_extension(format!("{}", std::process::id()));
        let mut command = Command::new(&compiler);
        command.args(variant.flags()).arg("-pthread").args(&objects).arg("-o").arg(&made);
        if library {
            command.args(["-shared", "-Wl,-soname,libcuda.so.1"]);
        }
        run(&mut command);
        fs::rename(&made, &program).unwrap();
    }
    Some(program)
}

/// Returns all kernel sources by path relative to the package.
fn sources() -> BTreeMap<String, String> {
    let mut files = BTreeMap::new();
    for part in ["cuda", "cuda/include", "host"] {
        for entry in fs::read_dir(folder().join(part)).unwrap() {
            let path = entry.unwrap().path();
            let is_source = |it: &std::ffi::OsStr| ["cu", "cuh", "h", "cpp"].iter().any(|extension| it == *extension);
            if path.extension().is_some_and(is_source) {
                let name = Path::new(part).join(path.file_name().unwrap());
                files.insert(name.to_str().unwrap().to_owned(), fs::read_to_string(path).unwrap());
            }
        }
    }
    files
}

fn copy(out: &Path, files: &BTreeMap<String, String>) -> PathBuf {
    let to = out.join(format!("modified-{}", short_hash(&files.values().cloned().collect::<Vec<_>>())));
    ["cuda/include", "host"].iter().for_each(|part| fs::create_dir_all(to.join(part)).unwrap());
    files.iter().for_each(|(name, text)| fs::write(to.join(name), text).unwrap());
    to
}

fn compile(
    compiler: &str,
    variant: Variant,
    name: &str,
    files: &BTreeMap<String, String>,
    from: &Path,
    out: &Path,
) -> PathBuf {
    let kernel = name.ends_with(".cu");
    let flags = if kernel { variant.flags() } else { variant.runtime_flags() };
    let mut parts = vec![compiler.to_owned(), format!("{flags:?}"), folder().display().to_string()];
    include(name, files, &mut parts);
    include("cuda_host.h", files, &mut parts);
    let object = out.join(format!("{}-{}.o", name.replace(['/', '.'], "-"), short_hash(&parts)));
    if object.exists() {
        return object;
    }
    let mut command = Command::new(compiler);
    command.current_dir(from).args(["-std=c++17", "-ffp-contract=off", "-pthread", "-Wall", "-Wextra"]);
    command.args(["-Wno-unknown-pragmas"]).args(flags);
    if from == folder() {
        command.arg("-Werror"); // An injected bug may leave something unused.
    }
    if kernel {
        command.args(["-x", "c++", "-include", "host/cuda_host.h", "-I", "cuda/include"]);
    }
    let made = object.with_extension(format!("{}", std::process::id()));
    run(command.args(["-c", name, "-o"]).arg(&made));
    fs::rename(&made, &object).unwrap();
    object
}

/// Collects the content of a file and of its includes.
fn include(name: &str, files: &BTreeMap<String, String>, parts: &mut Vec<String>) {
    let Some(text) = files.iter().find(|(path, _)| is_file(path, name)).map(|(_, text)| text) else { return };
    parts.push(text.clone());
    for line in text.lines() {
        if let Some(other) = line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"')) {
            include(other, files, parts);
        }
    }
}

/// Returns whether a path ends with this file, whose name is unique among the sources.
fn is_file(path: &str, file: &str) -> bool {
    path == file || path.rsplit('/').next() == Some(file)
}

fn short_hash(parts: &[String]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize()[..8].iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}\n{}", String::from_utf8_lossy(&output.stderr));
}
