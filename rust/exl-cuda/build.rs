//! Compiles `kernels/*.cu` into fatbins and writes the Rust file that embeds them.
//!
//! nvcc is looked for in `EXL_CUDA_HOME`, `CUDA_HOME`, the building environment's `nvidia/cu13` (the PyPI packages) and PATH. Without
//! one the crate still builds: it then holds no kernels and a sentence that says why.
//!
//! `EXL_CUDA_CACHE` names a folder that keeps fatbins by their content, for several checkouts of one machine.
//!
//! `PYO3_PYTHON` is read but not watched: isolated builds change it every time and would rerun nvcc every time.

use std::collections::hash_map::DefaultHasher;
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What a checkout builds: one architecture, because each costs seconds per file. `EXL_CUDA_ARCHS` overrides it.
const DEVELOPMENT_ARCHS: &str = "90a";
/// What a release holds (`EXL_CUDA_ARCHS=release`): every generation since Turing, and PTX of the newest for those to come.
const RELEASE_ARCHS: &str = "75 80 86 89 90a 100 120 120+ptx";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=kernels");
    for name in ["EXL_CUDA_ARCHS", "EXL_CUDA_HOME", "CUDA_HOME"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let layouts = layouts().unwrap_or_else(|why| panic!("{why}"));
    fs::write(out.join("abi.rs"), layouts).expect("OUT_DIR is writable");
    let table = match build(&out) {
        Ok(table) => table,
        Err(why) => {
            println!("cargo:warning=building without CUDA kernels: {why}");
            Table {
                note: why,
                ..Table::default()
            }
        }
    };
    fs::write(out.join("fatbins.rs"), table.to_rust()).expect("OUT_DIR is writable");
}

/// What the generated file says.
#[derive(Default)]
struct Table {
    fatbins: Vec<(String, PathBuf)>,
    archs: Vec<String>,
    toolkit: String,
    note: String,
}

impl Table {
    fn to_rust(&self) -> String {
        let mut text = String::from(
            "/// Name and image of each kernel file.\npub const FATBINS: &[(&str, &[u8])] = &[\n",
        );
        for (name, path) in &self.fatbins {
            writeln!(
                text,
                "    ({name:?}, include_bytes!({:?})),",
                path.display().to_string()
            )
            .expect("write to a String");
        }
        let archs = &self.archs;
        writeln!(
            text,
            "];\n/// Architectures built for.\npub const ARCHS: &[&str] = &{archs:?};\n\
             /// Version of the CUDA toolkit, empty when there was none.\npub const TOOLKIT: &str = {:?};\n\
             /// Why there are no kernels, empty when there are.\npub const NOTE: &str = {:?};",
            self.toolkit, self.note
        )
        .expect("write to a String");
        text
    }
}

fn build(out: &Path) -> Result<Table, String> {
    let nvcc = find_nvcc()?;
    let toolkit = toolkit_version(&nvcc)?;
    let archs = architectures()?;
    let sources = sources("cu")?;
    let flags = flags(&archs);
    let names: Vec<String> = sources
        .iter()
        .map(|p| {
            p.file_stem()
                .expect("a .cu file has a stem")
                .to_string_lossy()
                .into_owned()
        })
        .collect();
    let fatbins: Vec<PathBuf> = sources
        .iter()
        .zip(&names)
        .map(|(source, name)| {
            let text =
                fs::read_to_string(source).map_err(|e| format!("{}: {e}", source.display()))?;
            let mut hasher = DefaultHasher::new();
            (&text, headers_of(source, &text)?, &flags, &toolkit).hash(&mut hasher);
            Ok(out.join(format!("{name}-{:016x}.fatbin", hasher.finish())))
        })
        .collect::<Result<_, String>>()?;
    remove_stale(out, &fatbins);
    let cache = env::var_os("EXL_CUDA_CACHE").filter(|v| !v.is_empty());
    let cache = cache.map(PathBuf::from);
    let missing: Vec<usize> = (0..sources.len())
        .filter(|&i| !fatbins[i].exists() && !copied(cache.as_deref(), &fatbins[i]))
        .collect();
    compile_all(&nvcc, &flags, &sources, &fatbins, &missing)?;
    if let Some(cache) = cache {
        for &i in &missing {
            keep(&cache, &fatbins[i]);
        }
    }
    Ok(Table {
        fatbins: names.into_iter().zip(fatbins).collect(),
        archs,
        toolkit,
        note: String::new(),
    })
}

/// The files of one kind in `kernels/`, in a fixed order.
fn sources(extension: &str) -> Result<Vec<PathBuf>, String> {
    let folder =
        Path::new(&env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("kernels");
    let mut files: Vec<PathBuf> = fs::read_dir(&folder)
        .map_err(|e| format!("{}: {e}", folder.display()))?
        .filter_map(|entry| entry.ok().map(|e| e.path()))
        .filter(|path| path.extension().is_some_and(|e| e == extension))
        .collect();
    files.sort();
    Ok(files)
}

/// The headers of `kernels/` that a source includes, directly or through others: names and texts.
fn headers_of(source: &Path, text: &str) -> Result<Vec<(String, String)>, String> {
    let mut found: Vec<(String, String)> = Vec::new();
    let mut texts = vec![text.to_owned()];
    while let Some(text) = texts.pop() {
        for name in text.lines().filter_map(|line| {
            line.strip_prefix("#include \"")
                .and_then(|rest| rest.split('"').next())
        }) {
            if found.iter().any(|(known, _)| known == name) {
                continue;
            }
            let path = source.with_file_name(name);
            let inner =
                fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
            texts.push(inner.clone());
            found.push((name.to_owned(), inner));
        }
    }
    found.sort();
    Ok(found)
}

/// Rust constants of the layouts that the CUDA sources state: `file::Struct::{SIZE, FIELDS, field...}`.
fn layouts() -> Result<String, String> {
    let mut files = sources("cu")?;
    files.extend(sources("cuh")?);
    let mut text = String::new();
    for path in files.iter().filter(|path| !path.ends_with("abi.cuh")) {
        let source = fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
        let structs = layouts_in(&source).map_err(|e| format!("{}: {e}", path.display()))?;
        if !structs.is_empty() {
            let file = path.file_stem().expect("a source has a stem").display();
            writeln!(text, "pub mod {file} {{\n{structs}}}").expect("write to a String");
        }
    }
    Ok(text)
}

/// A struct of the CUDA sources: name, size, and names and offsets of its fields, as written.
struct StructLayout<'a> {
    name: &'a str,
    bytes: &'a str,
    fields: Vec<(&'a str, &'a str)>,
}

/// The constants of one source: `ABI_SIZE(Struct, bytes)` opens a struct, its `ABI_AT(Struct, field, offset)` follow.
fn layouts_in(source: &str) -> Result<String, String> {
    let mut structs: Vec<StructLayout> = Vec::new();
    for call in source.split("ABI_").skip(1) {
        let broken = || format!("expected SIZE(..) or AT(..) behind ABI_, found {call:.40}");
        let (kind, rest) = call.split_once('(').ok_or_else(broken)?;
        let (arguments, _) = rest.split_once(')').ok_or_else(broken)?;
        let arguments: Vec<&str> = arguments.split(',').map(str::trim).collect();
        match (kind, &arguments[..], structs.last_mut()) {
            ("SIZE", &[name, bytes], _) => structs.push(StructLayout {
                name,
                bytes,
                fields: Vec::new(),
            }),
            ("AT", &[name, field, at], Some(open)) if open.name == name => {
                open.fields.push((field, at));
            }
            _ => return Err(broken()),
        }
    }
    let mut text = String::new();
    for found in structs {
        let StructLayout {
            name,
            bytes,
            fields,
        } = found;
        let count = fields.len();
        write!(
            text,
            "    #[allow(non_snake_case, non_upper_case_globals)]\n    pub mod {name} {{\n        \
             pub const SIZE: usize = {bytes};\n        pub const FIELDS: usize = {count};\n"
        )
        .expect("write to a String");
        for (field, at) in fields {
            writeln!(text, "        pub const {field}: usize = {at};").expect("write to a String");
        }
        text.push_str("    }\n");
    }
    Ok(text)
}

fn architectures() -> Result<Vec<String>, String> {
    let asked = env::var("EXL_CUDA_ARCHS").unwrap_or_default();
    let list = match asked.trim() {
        "" => DEVELOPMENT_ARCHS,
        "release" => RELEASE_ARCHS,
        "none" => return Err("EXL_CUDA_ARCHS=none asked for a CPU-only build".to_owned()),
        other => other,
    };
    let archs: Vec<String> = list
        .replace([',', ';'], " ")
        .split_whitespace()
        .map(str::to_owned)
        .collect();
    for arch in &archs {
        let number = arch.trim_end_matches("+ptx").trim_end_matches('a');
        // A wrong list is a mistake of the person who builds, not a machine without CUDA: stop.
        assert!(
            number.len() >= 2 && number.chars().all(|c| c.is_ascii_digit()),
            "EXL_CUDA_ARCHS: {arch:?} is not an architecture; give numbers such as 86 or 90a, `release` or `none`"
        );
    }
    Ok(archs)
}

fn flags(archs: &[String]) -> Vec<String> {
    // Compressed about 9:1; unpacking at load costs less than reading the bytes would.
    let mut flags: Vec<String> = [
        "-fatbin",
        "-O3",
        "-std=c++17",
        "--expt-relaxed-constexpr",
        "--compress-mode=size",
    ]
    .map(str::to_owned)
    .to_vec();
    for arch in archs {
        let (number, kind) = match arch.strip_suffix("+ptx") {
            Some(number) => (number, "compute"),
            None => (arch.as_str(), "sm"),
        };
        flags.push(format!(
            "-gencode=arch=compute_{number},code={kind}_{number}"
        ));
    }
    flags
}

fn find_nvcc() -> Result<PathBuf, String> {
    for name in ["EXL_CUDA_HOME", "CUDA_HOME"] {
        if let Some(home) = env::var_os(name).filter(|v| !v.is_empty()) {
            let nvcc = Path::new(&home).join("bin/nvcc");
            if nvcc.is_file() {
                return Ok(nvcc);
            }
            println!(
                "cargo:warning={name} names {} but bin/nvcc is not there",
                Path::new(&home).display()
            );
        }
    }
    for packages in site_packages() {
        let nvcc = packages.join("nvidia/cu13/bin/nvcc");
        if nvcc.is_file() {
            return Ok(nvcc);
        }
        // Watching a path that is not there makes the next build look again.
        println!("cargo:rerun-if-changed={}", nvcc.display());
    }
    env::var_os("PATH")
        .and_then(|path| env::split_paths(&path).map(|p| p.join("nvcc")).find(|p| p.is_file()))
        .ok_or_else(|| {
            "no nvcc found in EXL_CUDA_HOME, CUDA_HOME, the Python environment (nvidia/cu13) or PATH; \
             `uv sync` installs one, or point EXL_CUDA_HOME at a toolkit"
                .to_owned()
        })
}

/// Package folders of the environment that builds: the interpreter maturin names, the active one, the checkout's own.
fn site_packages() -> Vec<PathBuf> {
    let mut found = Vec::new();
    if let Some(python) = env::var_os("PYO3_PYTHON") {
        let asked = Command::new(&python)
            .args([
                "-c",
                "import sysconfig; print(sysconfig.get_path('purelib'))",
            ])
            .output();
        if let Ok(answer) = asked {
            found.push(PathBuf::from(
                String::from_utf8_lossy(&answer.stdout).trim().to_owned(),
            ));
        }
    }
    let checkout =
        Path::new(&env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("../../.venv");
    for venv in env::var_os("VIRTUAL_ENV")
        .map(PathBuf::from)
        .into_iter()
        .chain([checkout])
    {
        let versions = fs::read_dir(venv.join("lib"))
            .into_iter()
            .flatten()
            .flatten();
        found.extend(
            versions
                .map(|v| v.path().join("site-packages"))
                .filter(|p| p.is_dir()),
        );
    }
    found.retain(|p| p.is_absolute());
    found.dedup();
    found
}

fn toolkit_version(nvcc: &Path) -> Result<String, String> {
    let answer = Command::new(nvcc)
        .arg("--version")
        .output()
        .map_err(|e| format!("{} does not run: {e}", nvcc.display()))?;
    let text = String::from_utf8_lossy(&answer.stdout).into_owned();
    let version = text
        .split_whitespace()
        .find_map(|word| word.strip_prefix('V'))
        .ok_or_else(|| format!("{} --version says no version", nvcc.display()))?;
    Ok(version.to_owned())
}

/// Runs nvcc on the files whose fatbin is missing, as many at a time as cargo grants jobs.
fn compile_all(
    nvcc: &Path,
    flags: &[String],
    sources: &[PathBuf],
    fatbins: &[PathBuf],
    missing: &[usize],
) -> Result<(), String> {
    let jobs = env::var("NUM_JOBS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(1usize);
    let next = AtomicUsize::new(0);
    let failures = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..jobs.min(missing.len()) {
            scope.spawn(|| {
                while let Some(&i) = missing.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(why) = compile(nvcc, flags, &sources[i], &fatbins[i]) {
                        failures.lock().expect("no panic while held").push(why);
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().expect("no panic while held");
    // A host without a usable C++ compiler gets the CPU-only module; a kernel that does not compile is our mistake and stops.
    match failures.first() {
        None => Ok(()),
        Some(why) if why.contains("error:") && !why.contains("nvcc fatal") => {
            panic!("{}", failures.join("\n"))
        }
        Some(why) => Err(format!(
            "nvcc cannot compile here: {}",
            why.lines().next().unwrap_or_default()
        )),
    }
}

fn compile(nvcc: &Path, flags: &[String], source: &Path, fatbin: &Path) -> Result<(), String> {
    // Written beside and renamed, so that an interrupted build leaves no half file under the final name.
    let partial = fatbin.with_extension("partial");
    let answer = Command::new(nvcc)
        .args(flags)
        .arg("-o")
        .arg(&partial)
        .arg(source)
        .output()
        .map_err(|e| format!("{} does not run: {e}", nvcc.display()))?;
    if !answer.status.success() {
        let text = String::from_utf8_lossy(&answer.stderr).into_owned();
        return Err(text);
    }
    fs::rename(&partial, fatbin).map_err(|e| format!("{}: {e}", fatbin.display()))
}

/// Whether the cache holds a fatbin of this name, which says what it was compiled from; if so it is at `fatbin` now.
fn copied(cache: Option<&Path>, fatbin: &Path) -> bool {
    let partial = fatbin.with_extension("partial");
    cache
        .zip(fatbin.file_name())
        .is_some_and(|(cache, name)| fs::copy(cache.join(name), &partial).is_ok())
        && fs::rename(&partial, fatbin).is_ok()
}

/// Puts a fatbin into the cache. A cache that cannot be written costs time, not the build.
fn keep(cache: &Path, fatbin: &Path) {
    let name = fatbin.file_name().expect("a fatbin has a name");
    let partial = cache.join(format!("{}.{}", name.display(), std::process::id()));
    let kept = fs::create_dir_all(cache)
        .and_then(|()| fs::copy(fatbin, &partial))
        .and_then(|_| fs::rename(&partial, cache.join(name)));
    if let Err(why) = kept {
        println!("cargo:warning=EXL_CUDA_CACHE: {}: {why}", cache.display());
    }
}

/// Drops images of earlier sources; without this OUT_DIR grows by every edit.
fn remove_stale(out: &Path, keep: &[PathBuf]) {
    for entry in fs::read_dir(out).into_iter().flatten().flatten() {
        let path = entry.path();
        let image = path
            .extension()
            .is_some_and(|e| e == "fatbin" || e == "partial");
        if image && !keep.contains(&path) {
            let _ = fs::remove_file(path);
        }
    }
}
