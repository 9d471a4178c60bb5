//! How a launch of the kernel of 3 to 8 rows cuts K: parts among blocks, stages of a ring, passes over the tiles.

/// Classes of units; `sum_classes` in `kernels/linear/tile_layout.cuh`. Each has a warp.
pub(super) const CLASSES: usize = 16;
/// Warps that finish tiles, each with separate result buffers.
pub(super) const FINISHERS: usize = 3;
/// Cut and stages of K: parts, log2 of the units of a tile in a stage, and passes over the tiles.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) cut: usize,
    pub(super) stage_log: usize,
    pub(super) passes: usize,
}

impl Shape {
    /// In the order of preference: K whole with long or short stages, in halves, in halves in two passes, in quarters.
    pub(super) const ALL: [Self; 5] = [
        Self::new(1, 3, 1),
        Self::new(1, 2, 1),
        Self::new(2, 1, 1),
        Self::new(2, 1, 2),
        Self::new(4, 1, 1),
    ];

    pub(super) const fn new(cut: usize, stage_log: usize, passes: usize) -> Self {
        Self {
            cut,
            stage_log,
            passes,
        }
    }

    /// Whether warps of this shape keep a class for several iterations of tiles of `units` units, of which each has one at most.
    pub(super) fn stays(self, units: usize) -> bool {
        self.cut == 1 && self.stage_log == 3 && self.stages(units) == 2
    }

    /// Stages of the first of two passes: a multiple of the stages of all classes.
    pub(super) fn first_stages(self, stages: usize) -> usize {
        let all = (CLASSES / self.cut) >> self.stage_log;
        match self.passes {
            1 => stages,
            _ => stages / 2 / all * all,
        }
    }

    /// Whether a launch can have this shape; `norm`: of its input; `iterations`: of a block over its tiles.
    pub(super) fn fits(self, units: usize, gated: bool, norm: bool, iterations: usize) -> bool {
        // Long stages of up to sixteen units let warps keep their units.
        let short = self.cut > 1 || self.stage_log == 3 || units > CLASSES;
        // A tile's sums wait in a result buffer for the second pass. The barrier of a norm has another use there.
        let twice = iterations <= FINISHERS && !gated && !norm;
        short && (self.passes == 1 || twice && self.first_stages(self.stages(units)) > 0)
    }

    /// Units of the longest part, whose quarters have every fourth unit each, and the stages of an iteration.
    pub(super) fn stages(self, units: usize) -> usize {
        let quarters = 4 / self.cut;
        let own = units / 4 * quarters + (units % 4).min(quarters);
        own.div_ceil(1 << self.stage_log)
    }

    /// Index in the tile of unit `local` of part `rank`.
    pub(super) fn unit(self, rank: usize, local: usize) -> usize {
        let quarters = 4 / self.cut;
        local / quarters * 4 + rank * quarters + local % quarters
    }

    /// Most bytes of one tile in a stage.
    pub(super) fn room(self, offsets: &[u32]) -> usize {
        let stages = self.stages(offsets.len() - 1);
        let bytes = (0..self.cut).flat_map(|rank| self.of_tile(offsets, rank, stages));
        bytes.max().unwrap_or(0)
    }

    /// Bytes of one tile in each stage of the block `rank`.
    pub(super) fn of_tile(self, offsets: &[u32], rank: usize, stages: usize) -> Vec<usize> {
        let units = offsets.len() - 1;
        let bytes = |u: usize| (offsets[(u + 1).min(units)] - offsets[u.min(units)]) as usize;
        let locals = |stage: usize| (stage << self.stage_log)..((stage + 1) << self.stage_log);
        let stage = |stage| {
            locals(stage)
                .map(|local| bytes(self.unit(rank, local)))
                .sum()
        };
        (0..stages).map(stage).collect()
    }

    /// Bytes of each stage of a block with the most.
    pub(super) fn stage_bytes(self, offsets: &[u32], stages: usize) -> Vec<usize> {
        let of_rank = |rank| self.of_tile(offsets, rank, stages);
        let most = (0..self.cut)
            .map(of_rank)
            .max_by_key(|all| all.iter().sum::<usize>());
        let all = most.unwrap_or_default().into_iter();
        all.map(|bytes| bytes * self.cut).collect()
    }

    /// Slots of a ring beyond its window: stages between two that a warp consumes. A warp that waits for a stage must not find its slot's
    /// barrier in the phase before the last (`ring/plan.rs` has the reasoning).
    pub(super) fn spare_slots(self, stages: usize, class_step: usize) -> usize {
        let classes = CLASSES / self.cut;
        if self.passes > 1 {
            return self.spare_slots_of_passes(stages, class_step);
        }
        let (within, step) = (
            |at: usize| (at % classes) >> self.stage_log,
            classes >> self.stage_log,
        );
        (0..CLASSES)
            .map(|at| {
                // Iterations in which a warp has no stage at all count as skipped. A warp may never have one again.
                let last = (within(at)..stages).step_by(step).next_back();
                let following = (1..=CLASSES)
                    .map(|i| (i * stages, within((at + i * class_step) % CLASSES)))
                    .find(|&(_, within)| within < stages);
                match (last, following) {
                    (Some(last), Some((passed, within))) => passed + within - last,
                    _ => 0,
                }
            })
            .chain([step])
            .max()
            .unwrap_or(step)
    }

    /// The same for two passes of any number of iterations, by enumeration.
    pub(super) fn spare_slots_of_passes(self, stages: usize, class_step: usize) -> usize {
        let (classes, first) = (CLASSES / self.cut, self.first_stages(stages));
        let step = classes >> self.stage_log;
        let mut most = step;
        for (iterations, warp) in
            (1..=FINISHERS).flat_map(|iterations| (0..CLASSES).map(move |w| (iterations, w)))
        {
            let (mut before, mut last) = (0, None);
            for stages in [first, stages - first] {
                for iteration in 0..iterations {
                    let at = (warp + iteration * class_step) % CLASSES;
                    let within = (at % classes) >> self.stage_log;
                    for stage in (within..stages).step_by(step) {
                        most = most.max(last.map_or(0, |last| before + stage - last));
                        last = Some(before + stage);
                    }
                    before += stages;
                }
            }
        }
        most
    }
}
