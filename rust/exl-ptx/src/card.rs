//! Cards that the stand-in driver can claim to be.

/// Properties that a driver reports and that limit a launch.
#[derive(Clone, Copy, Debug)]
pub struct Card {
    pub name: &'static str,
    pub compute: (i32, i32),
    pub sms: usize,
    /// Bytes of shared memory that a block may request.
    pub shared_per_block: usize,
    pub shared_per_sm: usize,
    pub threads_per_sm: usize,
    pub blocks_per_sm: usize,
    pub memory: usize,
}

const fn card(
    name: &'static str,
    compute: (i32, i32),
    sms: usize,
    kib: (usize, usize),
    threads_per_sm: usize,
    blocks_per_sm: usize,
    gib: usize,
) -> Card {
    Card {
        name,
        compute,
        sms,
        shared_per_block: kib.0 << 10,
        shared_per_sm: kib.1 << 10,
        threads_per_sm,
        blocks_per_sm,
        memory: gib << 30,
    }
}

/// From NVIDIA's tables of compute capabilities and data sheets.
const CARDS: [(&str, Card); 9] = [
    (
        "2080ti",
        card(
            "NVIDIA GeForce RTX 2080 Ti",
            (7, 5),
            68,
            (64, 64),
            1024,
            16,
            11,
        ),
    ),
    (
        "a100",
        card("NVIDIA A100", (8, 0), 108, (163, 164), 2048, 32, 80),
    ),
    (
        "3060",
        card(
            "NVIDIA GeForce RTX 3060",
            (8, 6),
            28,
            (99, 100),
            1536,
            16,
            12,
        ),
    ),
    (
        "3090",
        card(
            "NVIDIA GeForce RTX 3090",
            (8, 6),
            82,
            (99, 100),
            1536,
            16,
            24,
        ),
    ),
    (
        "4090",
        card(
            "NVIDIA GeForce RTX 4090",
            (8, 9),
            128,
            (99, 100),
            1536,
            24,
            24,
        ),
    ),
    (
        "5090",
        card(
            "NVIDIA GeForce RTX 5090",
            (12, 0),
            170,
            (99, 100),
            1536,
            24,
            32,
        ),
    ),
    (
        "h100",
        card("NVIDIA H100", (9, 0), 132, (227, 228), 2048, 32, 80),
    ),
    (
        "h200",
        card("NVIDIA H200", (9, 0), 132, (227, 228), 2048, 32, 141),
    ),
    // A card that no shop has: few blocks are resident, so that small grids meet the limits of large ones.
    (
        "tiny",
        card(
            "Small card of compute capability 8.6",
            (8, 6),
            2,
            (99, 100),
            1536,
            16,
            2,
        ),
    ),
];

impl Card {
    /// The card of a name of `EXL_PTX_CARD`.
    pub fn named(name: &str) -> Option<Self> {
        let plain = name.to_lowercase();
        CARDS
            .iter()
            .find(|(known, _)| *known == plain)
            .map(|&(_, card)| card)
    }

    pub fn names() -> String {
        CARDS.map(|(name, _)| name).join(", ")
    }

    /// Blocks of a launch that are resident at the same time; 0 if not even one fits.
    pub fn resident(&self, threads: usize, shared: usize) -> usize {
        // The cards reserve a kibibyte of shared memory for each block from compute capability 8.0 on.
        let reserved = if self.compute.0 >= 8 { 1024 } else { 0 };
        let by_shared = self.shared_per_sm / (shared + reserved).max(1);
        let by_threads = self.threads_per_sm / threads.next_multiple_of(32);
        self.sms * by_shared.min(by_threads).min(self.blocks_per_sm)
    }
}
