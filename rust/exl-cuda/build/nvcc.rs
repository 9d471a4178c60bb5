//! nvcc: its location, and one image for each kernel file and architecture, cached by content.

use std::collections::hash_map::DefaultHasher;
use std::env;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::archs::number_of;
use crate::features::{feature_of, is_specific};
use crate::kernels;
use crate::rows::{FEW_ROWS, GEMV_ROWS};

const FLAGS: [&str; 3] = ["-O3", "-std=c++17", "--expt-relaxed-constexpr"];
/// Limits of rows that `kernels/common/row_limits.cuh` names, whose only definition is in Rust.
const ROW_LIMITS: [(&str, usize); 2] = [("GEMV_ROWS", GEMV_ROWS), ("FEW_ROWS", FEW_ROWS)];

/// A CUDA compiler.
#[derive(Debug)]
pub struct Nvcc {
    path: PathBuf,
    /// Version of its toolkit, e.g. `13.0.88`.
    pub version: String,
}

/// The kernels of one file for one architecture.
#[derive(Debug)]
pub struct Image {
    pub file: String,
    pub arch: String,
    pub source: PathBuf,
    /// In `OUT_DIR`; the name contains the hash of its sources.
    pub path: PathBuf,
}

impl Nvcc {
    pub fn find() -> Result<Self, String> {
        let path = path_of_nvcc()?;
        let answer = output(Command::new(&path).arg("--version"))?;
        let version = answer
            .split_whitespace()
            .find_map(|word| word.strip_prefix('V'))
            .ok_or_else(|| format!("{} --version says no version", path.display()))?
            .to_owned();
        Ok(Self { path, version })
    }

    /// The architectures that this nvcc compiles for, e.g. 75, 80.
    pub fn known(&self) -> Result<Vec<i32>, String> {
        let answer = output(Command::new(&self.path).arg("--list-gpu-arch"))?;
        Ok(answer
            .split_whitespace()
            .filter_map(|word| word.strip_prefix("compute_")?.parse().ok())
            .collect())
    }

    /// The images of every source for every architecture whose code can have its kernels. The hash covers the text, its headers, the
    /// flags and the compiler.
    pub fn images(
        &self,
        out: &Path,
        sources: &[PathBuf],
        archs: &[String],
    ) -> Result<Vec<Image>, String> {
        let mut images = Vec::new();
        for source in sources {
            let file = source.file_stem().expect("a source has a stem").display();
            let text = kernels::read(source)?;
            let headers = kernels::headers_of(&text)?;
            let feature = feature_of(&file.to_string());
            let usable = |arch: &&String| {
                feature.is_none_or(|feature| feature.in_code(number_of(arch), is_specific(arch)))
            };
            for arch in archs.iter().filter(usable) {
                let mut hasher = DefaultHasher::new();
                (
                    &text,
                    &headers,
                    flags_of_sources(),
                    target_of(arch),
                    &self.version,
                )
                    .hash(&mut hasher);
                images.push(Image {
                    file: file.to_string(),
                    arch: arch.clone(),
                    source: source.clone(),
                    path: out.join(format!("{file}-{arch}-{:016x}.fatbin", hasher.finish())),
                });
            }
        }
        Ok(images)
    }

    /// Bring every image to its place: copied from the cache or compiled, in parallel within cargo's job limit.
    pub fn build(&self, images: &[Image], cache: &Path) -> Result<(), String> {
        let missing: Vec<&Image> = images
            .iter()
            .filter(|image| !image.path.exists() && !copied(cache, &image.path))
            .collect();
        let groups: Vec<&[&Image]> = missing
            .chunk_by(|a, b| a.source == b.source && family_of(&a.arch) == family_of(&b.arch))
            .collect();
        let jobs = env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok());
        let next = AtomicUsize::new(0);
        let failures = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for _ in 0..groups.len().min(jobs.unwrap_or(1)) {
                scope.spawn(|| {
                    while let Some(group) = groups.get(next.fetch_add(1, Ordering::Relaxed)) {
                        if let Err(why) = self.compile_group(group, cache) {
                            failures.lock().expect("no panic while held").push(why);
                        }
                    }
                });
            }
        });
        let failures = failures.into_inner().expect("no panic while held");
        // A host without a usable C++ compiler has no kernels. Any other failure stops the build. A kernel that does not compile, or a
        // compiler that ran out of memory or disk, must not leave a CPU-only module that no later build replaces.
        match failures.first() {
            None => Ok(()),
            Some(why) if why.contains("nvcc fatal") => Err(format!(
                "nvcc cannot compile here: {}",
                why.lines()
                    .rfind(|line| !line.trim().is_empty())
                    .unwrap_or_default()
            )),
            Some(_) => panic!("{}", failures.join("\n")),
        }
    }

    /// Compile the images of one source for architectures of one family, through the same PTX if there are several.
    fn compile_group(&self, group: &[&Image], cache: &Path) -> Result<(), String> {
        // Another checkout may have compiled some since.
        let of_sources = flags_of_sources();
        let of_sources: Vec<&str> = of_sources.iter().map(String::as_str).collect();
        let missing = || group.iter().filter(|image| !copied(cache, &image.path));
        let ptx = group[0].path.with_extension("ptx");
        let shared = missing().count() > 1;
        if shared {
            let target = format!("-arch=compute_{}", family_of(&group[0].arch));
            self.run(
                &[&["-ptx", &target], &of_sources[..]].concat(),
                &group[0].source,
                &ptx,
            )?;
        }
        for image in missing() {
            let source = if shared { &ptx } else { &image.source };
            let [target, mode] = target_of(&image.arch);
            let flags = if shared { &[] } else { &of_sources[..] };
            // Cached immediately, so that an interrupted build continues where it stopped.
            self.run(
                &[&["-fatbin", &target, &mode], flags].concat(),
                source,
                &image.path,
            )?;
            keep(cache, &image.path);
        }
        if shared {
            let _ = fs::remove_file(&ptx);
        }
        Ok(())
    }

    fn run(&self, flags: &[&str], from: &Path, to: &Path) -> Result<(), String> {
        // Renamed when complete, so that an interrupted build leaves no partial file under the final name.
        let partial = to.with_extension("partial");
        output(
            Command::new(&self.path)
                .args(flags)
                .arg("-I")
                .arg(kernels::folder())
                .arg("-o")
                .arg(&partial)
                .arg(from),
        )?;
        fs::rename(&partial, to).map_err(|e| format!("{}: {e}", to.display()))
    }
}

/// Flags of nvcc for CUDA C++, which the compilation of PTX does not take.
fn flags_of_sources() -> Vec<String> {
    let limits = ROW_LIMITS.map(|(name, rows)| format!("-DEXL_{name}={rows}"));
    FLAGS.map(str::to_owned).into_iter().chain(limits).collect()
}

/// The architecture whose PTX is the same as that of `arch`, except for the line that names the target, so that the compiler of CUDA C++ runs
/// once for all of them. tests/kernels/test_cuda_build.py checks that no kernel asks for an architecture within a family.
fn family_of(arch: &str) -> String {
    let number = arch.trim_end_matches("+ptx");
    match number {
        "86" | "89" => "80",
        "120" => "100",
        other => other,
    }
    .to_owned()
}

/// nvcc's target for an architecture: code for `89`, only PTX for `80+ptx`; and how to compress it.
///
/// Code is compressed as far as possible: unpacking at load costs less than reading the bytes would. For PTX that takes a noticeable share of
/// the build without a GPU, so PTX is a third larger, also in wheels (`120+ptx`).
fn target_of(arch: &str) -> [String; 2] {
    let family = family_of(arch);
    let (code, mode) = if arch.ends_with("+ptx") {
        (format!("compute_{family}"), "balance")
    } else {
        (format!("sm_{arch}"), "size")
    };
    [
        format!("-gencode=arch=compute_{family},code={code}"),
        format!("--compress-mode={mode}"),
    ]
}

/// Standard output of a command that succeeds, or its standard error.
fn output(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().display().to_string();
    let answer = command
        .output()
        .map_err(|e| format!("{name} does not run: {e}"))?;
    if answer.status.success() {
        Ok(String::from_utf8_lossy(&answer.stdout).into_owned())
    } else {
        let said = String::from_utf8_lossy(&answer.stderr);
        Err(format!("{name} fails\n{said}"))
    }
}

fn path_of_nvcc() -> Result<PathBuf, String> {
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
        // Watching the missing path makes the next build search again.
        println!("cargo:rerun-if-changed={}", nvcc.display());
    }
    env::var_os("PATH")
        .and_then(|path| {
            env::split_paths(&path)
                .map(|p| p.join("nvcc"))
                .find(|p| p.is_file())
        })
        .ok_or_else(|| {
            "no nvcc found in EXL_CUDA_HOME, CUDA_HOME, the Python environment (nvidia/cu13) or PATH"
                .to_owned()
        })
}

/// Package folders of the environment that builds: the interpreter that maturin names, the active one, and that of the checkout.
///
/// `PYO3_PYTHON` is read but not watched: isolated builds change it every time and would run nvcc every time.
fn site_packages() -> Vec<PathBuf> {
    let mut found = Vec::new();
    if let Some(python) = env::var_os("PYO3_PYTHON") {
        let ask = "import sysconfig; print(sysconfig.get_path('purelib'))";
        if let Ok(answer) = output(Command::new(&python).args(["-c", ask])) {
            found.push(PathBuf::from(answer.trim()));
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

/// Copy the image of this name from the cache to `image`. The name contains the hash of its sources. Returns whether the cache had it.
fn copied(cache: &Path, image: &Path) -> bool {
    let partial = image.with_extension("partial");
    image
        .file_name()
        .is_some_and(|name| fs::copy(cache.join(name), &partial).is_ok())
        && fs::rename(&partial, image).is_ok()
}

/// Put an image into the cache. A cache that cannot be written does not fail the build.
fn keep(cache: &Path, image: &Path) {
    let name = image.file_name().expect("an image has a name");
    let partial = cache.join(format!("{}.{}", name.display(), std::process::id()));
    let kept = fs::create_dir_all(cache)
        .and_then(|()| fs::copy(image, &partial))
        .and_then(|_| fs::rename(&partial, cache.join(name)));
    if let Err(why) = kept {
        println!("cargo:warning=kernel cache {}: {why}", cache.display());
    }
}
