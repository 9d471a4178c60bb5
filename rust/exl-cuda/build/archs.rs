//! The architectures to compile for.
//!
//! `EXL_CUDA_ARCHS` decides: a list (`86 89`), `release`, `none`, or `auto`, which is the default. Without the variable, the build takes
//! the choice that an earlier editable build kept in `rust/.cuda-archs` (packages/exl-kernels/backend writes that file). `auto` compiles
//! for the GPUs that the driver reports, and for [`PORTABLE`] without a GPU.

use std::env;
use std::fs;
use std::path::Path;

use crate::driver;

/// Without a GPU: PTX that the driver compiles at first use for any card since sm_80.
const PORTABLE: &str = "80+ptx";
/// `release`: every generation since Turing, and PTX of the newest for later cards. Cards of sm_89 run the code for sm_86, which is the same.
const RELEASE: &str = "75 80 86 90a 100 120 120+ptx";
/// The oldest architecture that nvcc 13 compiles for.
const OLDEST: i32 = 75;

/// `90` of `90a`, `80` of `80+ptx`.
pub fn number_of(arch: &str) -> i32 {
    let digits = arch.trim_end_matches("+ptx").trim_end_matches('a');
    digits
        .parse()
        .expect("an architecture that `choose` checked")
}

/// Architectures to compile for, and the reason.
#[derive(Debug)]
pub struct Choice {
    /// Such as `89`, `90a` or `80+ptx` (PTX only); empty: no kernels.
    pub archs: Vec<String>,
    /// Origin of the choice, as `exl doctor` shows it.
    pub origin: String,
    /// Whether the user asked for these architectures. A build without them is then an error.
    pub asked: bool,
}

/// Read the environment and the kept choice. `known` lists the architectures that nvcc compiles for.
pub fn choose(known: &[i32]) -> Result<Choice, String> {
    let variable = env::var("EXL_CUDA_ARCHS").unwrap_or_default();
    let (text, origin) = match variable.trim() {
        "" => (kept(), "EXL_CUDA_ARCHS kept in rust/.cuda-archs"),
        asked => (asked.to_owned(), "EXL_CUDA_ARCHS"),
    };
    let list = match text.as_str() {
        "" | "auto" => return Ok(of_the_gpus_present(known)),
        "none" => "",
        "release" => RELEASE,
        other => other,
    };
    let archs: Vec<String> = list
        .replace([',', ';'], " ")
        .split_whitespace()
        .map(str::to_owned)
        .collect();
    for arch in &archs {
        let number = arch.trim_end_matches("+ptx").trim_end_matches('a');
        if number.len() < 2 || !number.chars().all(|c| c.is_ascii_digit()) {
            return Err(format!(
                "{origin}: {arch:?} is not an architecture; give numbers such as 86 or 90a, `auto`, `release` or `none`"
            ));
        }
    }
    Ok(Choice {
        archs,
        origin: format!("{origin}: {text}"),
        asked: true,
    })
}

/// The choice of an earlier editable build; empty without one.
fn kept() -> String {
    let folder = env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it");
    let file = Path::new(&folder).join("../.cuda-archs");
    // Cargo would run this script in every build if a watched path did not exist.
    if file.is_file() {
        println!("cargo:rerun-if-changed={}", file.display());
    }
    fs::read_to_string(file)
        .unwrap_or_default()
        .trim()
        .to_owned()
}

fn of_the_gpus_present(known: &[i32]) -> Choice {
    let found = driver::compute_capabilities();
    let mut archs: Vec<String> = found
        .iter()
        .flatten()
        .filter_map(|&compute| own_arch(compute, known))
        .collect();
    archs.sort();
    archs.dedup();
    let origin = match (&found, archs.is_empty()) {
        (_, false) => "the GPUs present at build time".to_owned(),
        (Ok(_), true) => format!("no GPU present at build time is sm_{OLDEST} or newer"),
        (Err(why), true) => format!("no GPU present at build time ({why})"),
    };
    if archs.is_empty() {
        archs.push(PORTABLE.to_owned());
    }
    Choice {
        archs,
        origin,
        asked: false,
    }
}

/// The architecture of a card: its own if nvcc knows it, else PTX of the newest that nvcc knows; None for a card older than all of them.
fn own_arch((major, minor): (i32, i32), known: &[i32]) -> Option<String> {
    let own = major * 10 + minor;
    let newest = known
        .iter()
        .copied()
        .filter(|&arch| arch >= OLDEST && arch <= own)
        .max()?;
    Some(match own {
        // The kernels of `wgmma` need instructions that only this architecture has.
        90 if newest == 90 => "90a".to_owned(),
        _ if newest == own => own.to_string(),
        _ => format!("{newest}+ptx"),
    })
}
