//! Parameters of kernels, compared with what launches pass.
//!
//! `build/parameters.rs` reads the parameters of all kernels from the CUDA sources and generates a struct with a field for each
//! ([`kernels`]), named and typed as in CUDA. A launch fills one in, so rustc checks number, names and types. A kernel's first launch
//! compares the struct's parameters with those of the kernel whose name is launched.

use std::ffi::c_void;
use std::fmt;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::launch::CudaError;

include!(concat!(env!("OUT_DIR"), "/parameters.rs"));

/// The type of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Pointer,
    /// A number, by its name in Rust.
    Number(&'static str),
    /// A struct, by its name in CUDA, and its size.
    Struct(&'static str, usize),
}

impl Kind {
    fn bytes(self) -> usize {
        match self {
            Self::Number("i32" | "u32" | "f32") => 4,
            Self::Pointer | Self::Number(_) => 8,
            Self::Struct(_, bytes) => bytes,
        }
    }
}

/// A parameter of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter {
    pub name: &'static str,
    pub kind: Kind,
}

impl fmt::Display for Parameter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, kind } = self;
        match kind {
            Kind::Pointer => write!(f, "{name}: pointer"),
            Kind::Number(number) => write!(f, "{name}: {number}"),
            Kind::Struct(of, _) => write!(f, "{name}: struct {of}"),
        }
    }
}

/// Values for all parameters of a kernel.
pub trait Parameters {
    const LIST: &'static [Parameter];
    type Addresses: AsMut<[*mut c_void]>;
    /// The address of each value, in the order of the kernel.
    fn addresses(&mut self) -> Self::Addresses;
}

/// A struct that kernels take by value. `assert_layout!` implements this.
pub trait Passed {
    /// The marker in [`cuda`] of the CUDA struct.
    type Cuda;
}

/// The parameters of a kernel, and the list that its launches were last compared with.
pub(crate) struct Expected {
    list: &'static [Parameter],
    compared: AtomicPtr<Parameter>,
}

impl Expected {
    /// The parameters of kernel `name` in `file`; `None` if the sources have no such kernel.
    pub(crate) fn of(name: &str, file: &str) -> Option<Self> {
        let at = KERNELS
            .binary_search_by_key(&name, |kernel| kernel.0)
            .ok()?;
        let (_, found, list) = KERNELS[at];
        (found == file).then_some(Self {
            list,
            compared: AtomicPtr::default(),
        })
    }

    /// An error if a loaded image's `kernel` takes parameters of other sizes, `found`, than in the sources of this build.
    pub(crate) fn check_image(&self, kernel: &str, found: &[usize]) -> Result<(), CudaError> {
        let sizes: Vec<usize> = self.list.iter().map(|one| one.kind.bytes()).collect();
        if sizes == found {
            return Ok(());
        }
        Err(CudaError::Image {
            kernel: kernel.to_owned(),
            found: found.to_vec(),
            sizes,
        })
    }

    /// An error if `kernel` does not take the parameters `passed`. They are compared once: later launches with the same list pass.
    pub(crate) fn check(
        &self,
        kernel: &str,
        passed: &'static [Parameter],
    ) -> Result<(), CudaError> {
        let address = passed.as_ptr().cast_mut();
        let alike = passed.len() == self.list.len();
        if alike && self.compared.load(Ordering::Relaxed) == address {
            return Ok(());
        }
        if self.list != passed {
            let text = |list: &[Parameter]| {
                let all: Vec<String> = list.iter().map(Parameter::to_string).collect();
                all.join(", ")
            };
            return Err(CudaError::Parameters {
                kernel: kernel.to_owned(),
                takes: text(self.list),
                passed: text(passed),
            });
        }
        self.compared.store(address, Ordering::Relaxed);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The parameters of a kernel as text.
    fn text(kernel: &str) -> Vec<String> {
        let at = KERNELS.binary_search_by_key(&kernel, |found| found.0);
        let (_, _, list) = KERNELS[at.expect("a kernel of this name")];
        list.iter().map(Parameter::to_string).collect()
    }

    #[test]
    fn the_sources_have_the_kernels_that_devices_resolve() {
        let mut files: Vec<&str> = KERNELS.iter().map(|kernel| kernel.1).collect();
        files.sort_unstable();
        files.dedup();
        assert!(files.len() > 50);
        for file in files {
            let mut found: Vec<&str> = KERNELS
                .iter()
                .filter(|kernel| kernel.1 == file)
                .map(|kernel| kernel.0)
                .collect();
            let mut resolved = crate::ops::kernels_of(file);
            found.sort_unstable();
            resolved.sort_unstable();
            assert_eq!(found, resolved, "{file}");
        }
    }

    #[test]
    fn parameters_are_those_of_the_sources() {
        assert_eq!(text("probe_empty"), [""; 0]);
        assert_eq!(
            text("probe_read"),
            ["p: pointer", "count: u64", "sink: pointer"]
        );
        assert_eq!(
            text("attention_fp8_bf16_128_long1x2"),
            ["a: struct Attention"]
        );
        assert_eq!(
            text("rope_store_many"),
            [
                "p: struct Pages",
                "r: struct Rotation",
                "q: pointer",
                "k: pointer",
                "v: pointer",
                "slots: pointer",
                "q_heads: i32"
            ]
        );
        assert_eq!(
            text("add_rms_norm_f32"),
            [
                "x: pointer",
                "y: pointer",
                "weight: pointer",
                "out: pointer",
                "width: i32",
                "eps: f32",
                "offset: f32"
            ]
        );
    }

    #[test]
    fn an_image_has_parameters_of_the_sizes_of_the_sources() {
        let check = |kernel, file, found: &[usize]| {
            let expected = Expected::of(kernel, file).expect("a kernel");
            expected.check_image(kernel, found)
        };
        check("rope_store_many", "rope_store", &[64, 48, 8, 8, 8, 8, 4])
            .expect("as in the sources");
        check("probe_empty", "probe", &[]).expect("none");
        check("probe_read", "probe", &[8, 8, 8]).expect("as in the sources");
        for found in [&[8, 8][..], &[8, 4, 8], &[8, 8, 8, 4], &[]] {
            let text = check("probe_read", "probe", found)
                .expect_err("others")
                .to_string();
            assert!(
                text.contains("probe_read") && text.contains("[8, 8, 8]"),
                "{text}"
            );
        }
    }

    #[test]
    fn addresses_are_in_the_order_of_the_kernel() {
        let mut read = kernels::ProbeRead {
            sink: 3,
            count: 2,
            p: 1,
        };
        let addresses = read.addresses();
        // SAFETY: addresses of the fields above, of 8 bytes each.
        let values = addresses.map(|address| unsafe { *address.cast::<u64>() });
        assert_eq!(values, [1, 2, 3]);
    }

    #[test]
    fn other_parameters_are_an_error_that_names_the_kernel() {
        const SWAPPED: &[Parameter] = &[
            Parameter {
                name: "multipliers",
                kind: Kind::Pointer,
            },
            Parameter {
                name: "x",
                kind: Kind::Pointer,
            },
            Parameter {
                name: "k",
                kind: Kind::Number("i32"),
            },
        ];
        let expected = Expected::of("row_multipliers", "linear").expect("a kernel");
        assert!(Expected::of("row_multipliers", "rows").is_none());
        let check = |list| expected.check("row_multipliers", list);
        check(kernels::RowMultipliers::LIST).expect("its own");
        check(kernels::RowMultipliers::LIST).expect("again");
        for wrong in [
            SWAPPED,
            kernels::RowMultipliers::LIST.split_last().expect("three").1,
            kernels::ProbeEmpty::LIST,
            kernels::ProbeRead::LIST,
        ] {
            let text = check(wrong).expect_err("others").to_string();
            assert!(
                text.starts_with(
                    "kernel row_multipliers takes (x: pointer, multipliers: pointer, k: i32), and a launch passes ("
                ),
                "{text}"
            );
        }
        let passed = check(SWAPPED).expect_err("swapped").to_string();
        assert!(
            passed.ends_with("(multipliers: pointer, x: pointer, k: i32)"),
            "{passed}"
        );
    }
}
