//! Features that kernels need of the code they are compiled to. The build script reads this file too: it compiles only what runs.

/// Instructions that a kernel may need beyond those of every supported card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feature {
    /// Bulk asynchronous copies with transaction barriers.
    BulkCopy,
    /// Thread block clusters with distributed shared memory.
    Clusters,
    /// Clusters of which as many are resident as on sm_90 cards, which kernels that were only tested there count on.
    TestedClusters,
    /// Matrix instructions of a warpgroup.
    Wgmma,
    /// Copies to shared memory by a warp's lanes (`cp.async`), in kernels that code for sm_90 does not need.
    AsyncCopy,
    /// Little shared memory a block, for which prompts of heads of over 128 elements have kernels of their own.
    SmallBlocks,
    /// So little shared memory a block (Turing) that heads of 128 elements need such kernels, too.
    TuringBlocks,
    /// `mma.sync` fed by `cp.async`, in kernels that code with wgmma does not need.
    MmaPipeline,
    /// Copies to shared memory by a warp's lanes, in kernels for every card that has them.
    LaneCopies,
}

impl Feature {
    /// Whether code for sm_`code` can have the feature; `specific`: code for that architecture only, such as `90a`.
    pub fn in_code(self, code: i32, specific: bool) -> bool {
        match self {
            Self::BulkCopy | Self::Clusters | Self::TestedClusters => code >= 90,
            Self::Wgmma => code == 90 && specific,
            Self::AsyncCopy => code >= 80 && !(90..100).contains(&code),
            Self::SmallBlocks => !(90..100).contains(&code),
            Self::TuringBlocks => code < 80,
            Self::MmaPipeline => code >= 80 && !Self::Wgmma.in_code(code, specific),
            Self::LaneCopies => code >= 80,
        }
    }
}

/// Whether the code of an architecture runs on cards of this one capability only: `90a`, and its PTX (`90a+ptx`).
pub fn is_specific(arch: &str) -> bool {
    arch.trim_end_matches("+ptx").ends_with('a')
}

/// The feature that all kernels of `file` need; None: they run on every supported card.
pub fn feature_of(file: &str) -> Option<Feature> {
    let starts = |prefixes: &[&str]| prefixes.iter().any(|prefix| file.starts_with(prefix));
    if starts(&["batch_mma_"]) {
        Some(Feature::MmaPipeline)
    } else if starts(&["batch_", "attention_wide"]) {
        Some(Feature::Wgmma)
    } else if starts(&[
        "ring",
        "few",
        "attention_few_",
        "attention_long_",
        "experts_pairs_",
    ]) {
        Some(Feature::BulkCopy)
    } else if starts(&["attention_small_128_"]) {
        Some(Feature::TuringBlocks)
    } else if starts(&["attention_small_256_"]) {
        Some(Feature::SmallBlocks)
    } else if starts(&["attention_teams_"]) {
        Some(Feature::AsyncCopy)
    } else if starts(&["float_tile", "experts_float_tile"]) {
        Some(Feature::LaneCopies)
    } else {
        None
    }
}
