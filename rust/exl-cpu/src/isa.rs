//! The instruction set of the kernels: detected once, or forced (tests run every path on the same cases).

use std::sync::atomic::{AtomicU8, Ordering};

/// Instruction sets that have kernels, weakest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Isa {
    #[default]
    Scalar = 1,
    /// AVX2, FMA and F16C.
    Avx2 = 2,
    /// AVX-512 F, BW, VL, DQ and VNNI on top of `Avx2`.
    Avx512 = 3,
}

static CURRENT: AtomicU8 = AtomicU8::new(0);

impl Isa {
    /// The best instruction set of this processor.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            if avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vnni")
            {
                return Self::Avx512;
            }
            if avx2 {
                return Self::Avx2;
            }
        }
        Self::Scalar
    }

    /// The current instruction set: forced by [`Isa::force`], else by `EXL_CPU_ISA` (`scalar`, `avx2`, `avx512`), else detected.
    pub fn current() -> Self {
        match CURRENT.load(Ordering::Relaxed) {
            1 => Self::Scalar,
            2 => Self::Avx2,
            3 => Self::Avx512,
            _ => {
                let wanted = std::env::var("EXL_CPU_ISA")
                    .ok()
                    .and_then(|name| Self::from_name(&name));
                let isa = wanted.map_or(Self::detect(), |isa| isa.min(Self::detect()));
                // Another thread may have forced one meanwhile; the forced one stays.
                match CURRENT.compare_exchange(0, isa as u8, Ordering::Relaxed, Ordering::Relaxed) {
                    Ok(_) => isa,
                    Err(_) => Self::current(),
                }
            }
        }
    }

    /// Use `isa`, or the best available one below it. Returns the current one.
    pub fn force(isa: Self) -> Self {
        let isa = isa.min(Self::detect());
        CURRENT.store(isa as u8, Ordering::Relaxed);
        isa
    }

    /// Parses `scalar`, `avx2` or `avx512`.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "scalar" => Some(Self::Scalar),
            "avx2" => Some(Self::Avx2),
            "avx512" => Some(Self::Avx512),
            _ => None,
        }
    }
}
