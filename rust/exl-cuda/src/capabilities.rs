//! Features that a kernel may use on a card: those of the card, limited to those that this module's code for it was compiled with.
//!
//! A module built for `80+ptx` runs on an H100, but has no bulk-copy, cluster and wgmma kernels there.

use crate::features::{Feature, is_specific};

/// Capabilities that decide which kernels a card can run, and in what shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Compute capability of the card.
    pub compute: (i32, i32),
    /// Architecture of the code that the card runs, e.g. 80 for `80`, `80+ptx`; 0 if the module holds none for it.
    pub code: i32,
    /// Whether that code was compiled for one architecture only (`90a`), with its specific instructions.
    pub specific: bool,
    /// SMs of the card.
    pub sms: usize,
    /// Bytes of shared memory that a block may request.
    pub shared_per_block: usize,
}

impl Feature {
    /// Those of reports: what kernels may use. Others say for which cards a kernel is.
    pub const ALL: [Self; 6] = [
        Self::BulkCopy,
        Self::Clusters,
        Self::TestedClusters,
        Self::Wgmma,
        Self::AsyncCopy,
        Self::MmaPipeline,
    ];

    /// Name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::BulkCopy => "bulk_copy",
            Self::Clusters => "clusters",
            Self::TestedClusters => "tested_clusters",
            Self::Wgmma => "wgmma",
            Self::AsyncCopy => "async_copy",
            Self::SmallBlocks => "small_blocks",
            Self::TuringBlocks => "turing_blocks",
            Self::MmaPipeline => "mma_pipeline",
            Self::LaneCopies => "lane_copies",
        }
    }

    /// Name for messages, with the code that has the feature.
    pub fn describe(self) -> &'static str {
        match self {
            Self::BulkCopy => "bulk copies (code for sm_90 or newer)",
            Self::Clusters => "thread block clusters (code for sm_90 or newer, data-center cards)",
            Self::TestedClusters => {
                "clusters as sm_90 cards run them (code for sm_90 on an sm_90 card)"
            }
            Self::Wgmma => "wgmma (code for sm_90a on an sm_90 card)",
            Self::AsyncCopy => "code for sm_80 to sm_89, or for sm_100 or newer",
            Self::SmallBlocks => "a card with less than 128 KiB of shared memory a block",
            Self::TuringBlocks => "a card with 64 KiB of shared memory a block",
            Self::MmaPipeline | Self::LaneCopies => "asynchronous copies (code for sm_80 or newer)",
        }
    }
}

/// Environment variable that names the card as which GPUs are treated, to run the launch plans of cards that are not there.
pub(crate) const LIMITS_VARIABLE: &str = "EXL_CUDA_LIMITS";

/// Properties of a card that decide its kernels, known without having the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Card {
    pub name: &'static str,
    pub compute: (i32, i32),
    pub sms: usize,
    /// KiB of shared memory that a block may request.
    pub shared_kib: usize,
    /// The architecture that a build for this card only compiles.
    pub arch: &'static str,
}

const fn known(
    name: &'static str,
    compute: (i32, i32),
    sms: usize,
    shared_kib: usize,
    arch: &'static str,
) -> Card {
    Card {
        name,
        compute,
        sms,
        shared_kib,
        arch,
    }
}

/// Cards whose kernels can be listed on other machines, from NVIDIA's tables of compute capabilities and data sheets.
pub const CARDS: [Card; 11] = [
    known("2080 Ti", (7, 5), 68, 64, "75"),
    known("3060", (8, 6), 28, 99, "86"),
    known("3090", (8, 6), 82, 99, "86"),
    known("4090", (8, 9), 128, 99, "89"),
    known("5090", (12, 0), 170, 99, "120"),
    known("A100", (8, 0), 108, 163, "80"),
    known("L4", (8, 9), 58, 99, "89"),
    known("L40S", (8, 9), 142, 99, "89"),
    known("H100", (9, 0), 132, 227, "90a"),
    known("H200", (9, 0), 132, 227, "90a"),
    known("B200", (10, 0), 148, 227, "100"),
];

impl Card {
    /// Find a card by name or, as `sm_86`, the one of this compute capability with the most SMs.
    fn named_or_capable(text: &str) -> Option<Self> {
        let asked = text.trim().to_lowercase();
        let capable = |number: i32| {
            CARDS
                .into_iter()
                .filter(|card| card.compute.0 * 10 + card.compute.1 == number)
                .max_by_key(|card| card.sms)
        };
        match asked.strip_prefix("sm_") {
            Some(digits) => digits.parse().ok().and_then(capable),
            None => Self::named(&asked),
        }
    }

    /// Find a card by name; case, spaces and a leading `RTX` do not matter.
    pub fn named(name: &str) -> Option<Self> {
        let plain = |text: &str| text.to_lowercase().replace([' ', '-', '_'], "");
        let asked = plain(name);
        let asked = asked.trim_start_matches("rtx");
        CARDS.into_iter().find(|card| plain(card.name) == asked)
    }

    /// The card's capabilities with code from `archs`.
    pub fn with(&self, archs: &[&'static str]) -> Capabilities {
        Capabilities::of(self.compute, self.sms, self.shared_kib * 1024, archs)
    }

    /// The card's capabilities with the code of a build for it.
    pub fn with_own_code(&self) -> Capabilities {
        self.with(&[self.arch])
    }
}

impl Capabilities {
    /// The capabilities of a card that runs code from `archs`, the architectures of a build (`90a`, `80+ptx`, ...).
    pub fn of(
        compute: (i32, i32),
        sms: usize,
        shared_per_block: usize,
        archs: &[&'static str],
    ) -> Self {
        let chosen = chosen(archs, compute);
        Self {
            compute,
            code: chosen.map_or(0, number),
            specific: chosen.is_some_and(is_specific),
            sms,
            shared_per_block,
        }
    }

    /// Find the capabilities that launches are planned for on a GPU with these ones that is treated as the card `named`: its compute
    /// capability, and at most its SMs and its shared memory.
    ///
    /// # Errors
    /// No such card is known, or it would run other code of the build than this GPU.
    pub(crate) fn within(
        &self,
        named: &str,
        archs: &[&'static str],
    ) -> Result<(Self, Card), String> {
        let Some(card) = Card::named_or_capable(named) else {
            let known: Vec<_> = CARDS.iter().map(|card| card.name).collect();
            return Err(format!(
                "{LIMITS_VARIABLE} is {named:?}, expected one of {}, or a compute capability such as sm_86",
                known.join(", ")
            ));
        };
        let limited = card.with(archs);
        if (limited.code, limited.specific) != (self.code, self.specific) {
            let (major, minor) = card.compute;
            return Err(format!(
                "{LIMITS_VARIABLE}={named}: this GPU runs the build's code for {}, and an {} (sm_{major}{minor}) {}; build \
                 with EXL_CUDA_ARCHS={}+ptx",
                architecture(self),
                card.name,
                if limited.runs() {
                    format!("runs that for {}", architecture(&limited))
                } else {
                    "runs none of it".to_owned()
                },
                if major < 8 { 75 } else { 80 },
            ));
        }
        let limited = Self {
            sms: limited.sms.min(self.sms),
            shared_per_block: limited.shared_per_block.min(self.shared_per_block),
            ..limited
        };
        Ok((limited, card))
    }

    /// Whether the module holds code that the card runs.
    pub fn runs(&self) -> bool {
        self.code > 0
    }

    /// Whether kernels that need `feature` work on this card.
    pub fn has(&self, feature: Feature) -> bool {
        let on_card = match feature {
            // Consumer Blackwell (sm_12x) is planned without clusters: no kernel that uses them has been tested there.
            Feature::Clusters => self.compute.0 < 12,
            Feature::TestedClusters => self.compute.0 == 9,
            Feature::Wgmma => self.compute == (9, 0),
            Feature::SmallBlocks => self.shared_per_block < 128 * 1024,
            Feature::TuringBlocks => self.shared_per_block <= 64 * 1024,
            Feature::BulkCopy | Feature::AsyncCopy | Feature::MmaPipeline | Feature::LaneCopies => {
                true
            }
        };
        on_card && feature.in_code(self.code, self.specific)
    }

    /// Whether kernels may start while their predecessor drains: only code for sm_90 and later waits for it.
    pub fn programmatic(&self) -> bool {
        self.code >= 90
    }
}

/// The architecture whose code has these capabilities, such as `sm_90a`.
fn architecture(of: &Capabilities) -> String {
    match of.code {
        0 => "no architecture".to_owned(),
        code => format!("sm_{code}{}", if of.specific { "a" } else { "" }),
    }
}

/// `90` of `90a`, `80` of `80+ptx`.
fn number(arch: &str) -> i32 {
    arch.trim_end_matches("+ptx")
        .trim_end_matches('a')
        .parse()
        .unwrap_or(i32::MAX)
}

/// Whether one architecture's code runs on a card: the same major at an equal or lower minor; `a` only exactly; PTX on equal or later
/// cards.
fn runs_on(arch: &str, (major, minor): (i32, i32)) -> bool {
    let number = number(arch);
    if is_specific(arch) {
        number == major * 10 + minor
    } else if arch.ends_with("+ptx") {
        number <= major * 10 + minor
    } else {
        number / 10 == major && number % 10 <= minor
    }
}

/// The architecture whose code the driver picks for a card: binaries before PTX, the newest that fits, `90a` before `90`.
pub(crate) fn chosen<'a>(archs: &[&'a str], compute: (i32, i32)) -> Option<&'a str> {
    archs
        .iter()
        .copied()
        .filter(|arch| runs_on(arch, compute))
        .max_by_key(|arch| (!arch.ends_with("+ptx"), number(arch), is_specific(arch)))
}

/// The architecture that a build only for a card of this compute capability compiles.
pub fn own_arch((major, minor): (i32, i32)) -> String {
    match (major, minor) {
        (9, 0) => "90a".to_owned(),
        _ => format!("{major}{minor}"),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A card of [`CARDS`] with code from `archs`.
    pub fn card(name: &str, archs: &[&'static str]) -> Capabilities {
        Card::named(name).expect("a card of the list").with(archs)
    }

    /// The architectures of a release.
    pub const RELEASE: &[&str] = &["75", "80", "86", "90a", "100", "120", "120+ptx"];

    /// The card that the launch plans were measured on.
    pub fn hopper() -> Capabilities {
        card("H100", &["90a"])
    }

    #[test]
    fn binary_and_ptx_compatibility() {
        assert!(runs_on("80", (8, 6)) && runs_on("80", (8, 0)) && !runs_on("86", (8, 0)));
        assert!(runs_on("90a", (9, 0)) && !runs_on("90a", (10, 0)) && !runs_on("75", (8, 0)));
        assert!(
            runs_on("120+ptx", (12, 1))
                && runs_on("120+ptx", (13, 0))
                && !runs_on("120+ptx", (9, 0))
        );
        assert!(runs_on("90a+ptx", (9, 0)) && !runs_on("90a+ptx", (10, 0)));
        assert!(!Capabilities::of((9, 0), 132, 0, &[]).runs());
    }

    #[test]
    fn the_code_a_card_gets() {
        let code = |archs: &[&'static str], compute| Capabilities::of(compute, 1, 0, archs).code;
        assert_eq!(code(&["90a"], (9, 0)), 90);
        assert_eq!(code(&["80+ptx"], (9, 0)), 80);
        assert_eq!(code(&["80+ptx", "90a"], (9, 0)), 90);
        assert_eq!(code(&["90a", "80+ptx"], (10, 0)), 80);
        assert_eq!(code(&["80", "86", "120+ptx"], (8, 9)), 86);
        assert_eq!(code(&["75", "120+ptx"], (12, 0)), 120);
        assert_eq!(code(&["75+ptx", "90a"], (7, 5)), 75);
        assert_eq!(code(&[], (9, 0)), 0);
    }

    #[test]
    fn limits_of_another_card() {
        const PORTABLE: &[&str] = &["80+ptx"];
        let here = card("H100", PORTABLE);
        let (limited, of) = here.within("RTX 3060", PORTABLE).unwrap();
        assert_eq!((of.name, limited), ("3060", card("3060", PORTABLE)));
        let (by_number, of) = here.within("sm_86", PORTABLE).unwrap();
        assert_eq!((of.name, by_number), ("3090", card("3090", PORTABLE)));
        // Blocks that wait for one another must all be resident: never more SMs, nor more memory, than the GPU has.
        let small = card("3060", PORTABLE);
        let (limited, _) = small.within("a100", PORTABLE).unwrap();
        assert_eq!((limited.sms, limited.shared_per_block), (28, 99 * 1024));
        for (named, archs, says) in [
            ("3091", PORTABLE, "one of 2080 Ti, 3060"),
            ("sm_87", PORTABLE, "expected"),
            ("sm_x", PORTABLE, "expected"),
            (
                "2080 Ti",
                PORTABLE,
                "runs none of it; build with EXL_CUDA_ARCHS=75+ptx",
            ),
            ("3090", &["90a"], "build with EXL_CUDA_ARCHS=80+ptx"),
            ("3090", &["80+ptx", "90a"], "runs that for sm_80"),
        ] {
            let why = card("H100", archs).within(named, archs).unwrap_err();
            assert!(why.contains(says) && why.contains(named), "{why}");
        }
    }

    #[test]
    fn features_are_those_of_the_code_not_of_the_card() {
        let features = |card: Capabilities| {
            [Feature::BulkCopy, Feature::Clusters, Feature::Wgmma].map(|f| card.has(f))
        };
        assert_eq!(features(card("H100", &["90a"])), [true; 3]);
        assert_eq!(features(card("H100", &["90a+ptx"])), [true; 3]);
        assert_eq!(features(card("H100", &["90"])), [true, true, false]);
        assert_eq!(features(card("H100", &["80+ptx"])), [false; 3]);
        assert_eq!(features(card("H100", &["90", "90a"])), [true; 3]);
        assert_eq!(features(card("B200", RELEASE)), [true, true, false]);
        assert_eq!(features(card("5090", RELEASE)), [true, false, false]);
        assert_eq!(features(card("4090", RELEASE)), [false; 3]);
        let tested = |name, archs| card(name, archs).has(Feature::TestedClusters);
        assert!(tested("H100", RELEASE) && tested("H200", &["90"]));
        assert!(
            !tested("H100", &["80+ptx"])
                && !tested("B200", RELEASE)
                && !tested("B200", &["90+ptx"])
        );
        let copies = |name, archs| card(name, archs).has(Feature::AsyncCopy);
        assert!(copies("4090", RELEASE) && copies("A100", RELEASE));
        assert!(copies("H100", &["80+ptx"]) && !copies("H100", RELEASE));
        assert!(copies("5090", RELEASE) && copies("B200", RELEASE));
        assert!(!copies("2080 Ti", RELEASE) && !copies("B200", &["90+ptx"]));
        let small = |name, archs| {
            [Feature::SmallBlocks, Feature::TuringBlocks].map(|f| card(name, archs).has(f))
        };
        assert_eq!(small("2080 Ti", RELEASE), [true, true]);
        for name in ["3060", "3090", "4090", "5090", "L4", "L40S"] {
            assert_eq!(small(name, RELEASE), [true, false], "{name}");
        }
        for name in ["A100", "H100", "B200"] {
            assert_eq!(small(name, RELEASE), [false, false], "{name}");
            assert_eq!(small(name, &["80+ptx"]), [false, false], "{name}");
        }
        let pipelines = |name, archs| card(name, archs).has(Feature::MmaPipeline);
        assert!(["3090", "A100", "5090", "B200"].map(|name| pipelines(name, RELEASE)) == [true; 4]);
        assert!(pipelines("H100", &["80+ptx"]) && pipelines("H100", &["90"]));
        assert!(!pipelines("H100", RELEASE) && !pipelines("2080 Ti", RELEASE));
        let lanes = |name, archs| card(name, archs).has(Feature::LaneCopies);
        assert!(lanes("H100", RELEASE) && lanes("3090", RELEASE) && !lanes("2080 Ti", RELEASE));
        assert!(!card("H100", &["80+ptx"]).programmatic() && card("5090", RELEASE).programmatic());
        assert!(CARDS.iter().all(|card| card.with(RELEASE).runs()));
        assert!(Card::named("rtx 4090").is_some() && Card::named("RTX4090").is_some());
        assert!(CARDS.iter().all(|card| card.with_own_code().runs()));
        assert!(CARDS.iter().all(|card| card.arch == own_arch(card.compute)));
    }
}
