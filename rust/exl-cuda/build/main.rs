//! Compile `kernels/**/*.cu` for the architectures of [`archs`] and write the Rust file that embeds the images.
//!
//! The build looks for nvcc in `EXL_CUDA_HOME`, `CUDA_HOME`, the building environment's `nvidia/cu13` (the PyPI packages) and PATH. Without
//! nvcc, an editable build or a test of these crates gets a module without kernels that says why. A release build (a wheel) and a build for
//! requested architectures fail instead. `EXL_CUDA_ARCHS=none` asks for a module without kernels.
//!
//! Images are cached by content in `target/cuda-cache`, for all profiles; `EXL_CUDA_CACHE` names another folder, which several checkouts
//! may share.

mod abi;
mod archs;
mod driver;
#[path = "../src/features.rs"]
#[allow(dead_code, reason = "the crate uses all of it")]
mod features;
mod kernels;
mod macros;
mod nvcc;
mod parameters;
#[path = "../src/rows.rs"]
#[allow(dead_code, reason = "the crate uses all of it")]
mod rows;

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use archs::Choice;
use nvcc::{Image, Nvcc};

/// The remedy for a build without nvcc.
const REMEDY: &str = "install the packages of `cuda-toolkit[nvcc,nvvm,crt,cccl,cudart]` into the environment that builds (`uv sync` does) \
    or point EXL_CUDA_HOME at a CUDA toolkit; EXL_CUDA_ARCHS=none builds for the CPU only";

fn main() {
    println!("cargo:rerun-if-changed=build");
    println!("cargo:rerun-if-changed=kernels");
    println!("cargo:rerun-if-changed=src/features.rs");
    println!("cargo:rerun-if-changed=src/rows.rs");
    for name in [
        "EXL_CUDA_ARCHS",
        "EXL_CUDA_HOME",
        "CUDA_HOME",
        "EXL_CUDA_CACHE",
    ] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let shared = abi::shared().unwrap_or_else(|why| stop(&why));
    fs::write(out.join("abi.rs"), shared).expect("OUT_DIR is writable");
    let parameters = parameters::generated().unwrap_or_else(|why| stop(&why));
    fs::write(out.join("parameters.rs"), parameters).expect("OUT_DIR is writable");
    let nvcc = Nvcc::find();
    let known = nvcc.as_ref().map_or(Ok(Vec::new()), Nvcc::known);
    let choice =
        archs::choose(&known.unwrap_or_else(|why| stop(&why))).unwrap_or_else(|why| stop(&why));
    let table = if choice.archs.is_empty() {
        Table::without_kernels(&format!("{} asked for none", choice.origin))
    } else {
        match nvcc.and_then(|nvcc| compile(&nvcc, &choice, &out)) {
            Ok(table) => table,
            Err(why) if choice.asked || released(&out) => stop(&format!("{why}; {REMEDY}")),
            Err(why) => {
                println!("cargo:warning=building without CUDA kernels: {why}");
                Table::without_kernels(&format!("{why}; {REMEDY}"))
            }
        }
    };
    fs::write(out.join("fatbins.rs"), table.to_rust()).expect("OUT_DIR is writable");
}

/// Ends the build with a message, without a backtrace.
fn stop(why: &str) -> ! {
    eprintln!("{why}");
    std::process::exit(1)
}

/// Whether this is a release build: only `OUT_DIR` tells the profile.
fn released(out: &Path) -> bool {
    cfg!(target_os = "linux") && profile_folder(out).ends_with("release")
}

/// `target/<profile>`, of `OUT_DIR`: `target/<profile>/build/<crate>/out`.
fn profile_folder(out: &Path) -> &Path {
    out.ancestors().nth(3).unwrap_or(out)
}

fn compile(nvcc: &Nvcc, choice: &Choice, out: &Path) -> Result<Table, String> {
    let images = nvcc.images(out, &kernels::sources("cu")?, &choice.archs)?;
    remove_stale(out, &images);
    let cache = match env::var_os("EXL_CUDA_CACHE").filter(|v| !v.is_empty()) {
        Some(asked) => PathBuf::from(asked),
        None => profile_folder(out).with_file_name("cuda-cache"),
    };
    nvcc.build(&images, &cache)?;
    Ok(Table {
        images,
        archs: choice.archs.clone(),
        origin: choice.origin.clone(),
        toolkit: nvcc.version.clone(),
        note: String::new(),
    })
}

/// Delete images of earlier sources; otherwise OUT_DIR would grow with every edit.
fn remove_stale(out: &Path, keep: &[Image]) {
    for entry in fs::read_dir(out).into_iter().flatten().flatten() {
        let path = entry.path();
        let image = path
            .extension()
            .is_some_and(|e| e == "fatbin" || e == "ptx" || e == "partial");
        if image && !keep.iter().any(|kept| kept.path == path) {
            let _ = fs::remove_file(path);
        }
    }
}

/// Content of the generated file.
#[derive(Default)]
struct Table {
    images: Vec<Image>,
    archs: Vec<String>,
    origin: String,
    toolkit: String,
    note: String,
}

impl Table {
    fn without_kernels(why: &str) -> Self {
        Self {
            note: why.to_owned(),
            ..Self::default()
        }
    }

    fn to_rust(&self) -> String {
        let mut text = String::from(
            "/// File, architecture and image of each unit of kernels.\n\
             pub const FATBINS: &[(&str, &str, &[u8])] = &[\n",
        );
        for Image {
            file, arch, path, ..
        } in &self.images
        {
            let path = path.display().to_string();
            writeln!(text, "    ({file:?}, {arch:?}, include_bytes!({path:?})),")
                .expect("write to a String");
        }
        let Self {
            archs,
            origin,
            toolkit,
            note,
            ..
        } = self;
        writeln!(
            text,
            "];\n/// Architectures built for.\npub const ARCHS: &[&str] = &{archs:?};\n\
             /// The reason for these architectures.\npub const ORIGIN: &str = {origin:?};\n\
             /// Version of the CUDA toolkit, empty if there was none.\npub const TOOLKIT: &str = {toolkit:?};\n\
             /// The reason for missing kernels, empty if there are kernels.\npub const NOTE: &str = {note:?};"
        )
        .expect("write to a String");
        text
    }
}
