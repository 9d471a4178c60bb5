//! The order of a checked matrix's rows.

use exl_format::exl2::{Exl2View, Group};
use exl_format::gptq::GptqView;

use super::{Layout, ONE_SCALE_A_HALF, SLICE_ROWS, Scales, UNIT_ROWS, Unit};

/// A matrix that this layout cannot hold.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum Problem {
    #[error("{rows} rows after padding: the GPU layout holds at most {limit}")]
    TooManyRows { rows: usize, limit: usize },
    #[error("a tile of {bytes} bytes: the GPU layout holds at most {limit}")]
    TileTooLarge { bytes: usize, limit: usize },
}

/// 32 rows of one width and group.
#[derive(Clone, Debug)]
struct Slice {
    bits: u32,
    group: u32,
    /// Source rows, -1 for padding.
    rows: [i32; SLICE_ROWS],
}

impl Slice {
    /// Slices of one group's rows; the last one is padded.
    fn of_group(bits: u32, group: u32, rows: &[i32]) -> impl Iterator<Item = Self> {
        rows.chunks(SLICE_ROWS).map(move |part| {
            let mut rows = [-1; SLICE_ROWS];
            rows[..part.len()].copy_from_slice(part);
            Self { bits, group, rows }
        })
    }
}

impl Layout {
    /// The order of an EXL2 matrix. Groups keep their order within a width.
    ///
    /// `fine`: a scale for every 32 rows, also where all groups have 128, so that a launch takes it together with a matrix that
    /// [`has_fine_scales`].
    pub fn exl2(view: &Exl2View<'_>, fine: bool) -> Result<Self, Problem> {
        let slices = slices_of(view.groups());
        let perm = view.perm();
        let mut layout = Self::of_slices(
            Scales::Exl2,
            fine,
            &slices,
            view.in_features(),
            view.out_features(),
            |row| perm[row] as i32,
        )?;
        layout.maxima = layout
            .groups
            .iter()
            .map(|&g| view.smax(g as usize))
            .collect();
        Ok(layout)
    }

    /// The order of a GPTQ matrix: rows sorted by group, each group padded to whole slices.
    pub fn gptq(view: &GptqView<'_>) -> Result<Self, Problem> {
        let mut of_group = vec![Vec::new(); view.num_groups()];
        for (row, &group) in view.group_of().iter().enumerate() {
            of_group[group as usize].push(row as i32);
        }
        let slices: Vec<Slice> = of_group
            .iter()
            .enumerate()
            .flat_map(|(g, rows)| Slice::of_group(view.bits(), g as u32, rows))
            .collect();
        Self::of_slices(
            Scales::Gptq,
            false,
            &slices,
            view.in_features(),
            view.out_features(),
            |row| row as i32,
        )
    }

    fn of_slices(
        scales: Scales,
        fine: bool,
        slices: &[Slice],
        in_features: usize,
        out_features: usize,
        feature_of: impl Fn(usize) -> i32,
    ) -> Result<Self, Problem> {
        let slices = ordered(slices);
        let rows = slices.len() * SLICE_ROWS;
        // Scattered activations are addressed with 16 bits.
        let limit = usize::from(u16::MAX);
        if rows > limit {
            return Err(Problem::TooManyRows { rows, limit });
        }
        let entry_slices = if fine || !share_groups(&slices) {
            1
        } else {
            RUN
        };
        let entry_rows = entry_slices * SLICE_ROWS;
        let source_rows: Vec<i32> = slices.iter().flat_map(|slice| slice.rows).collect();
        let features = source_rows
            .iter()
            .map(|&row| {
                if row < 0 {
                    -1
                } else {
                    feature_of(row as usize)
                }
            })
            .collect();
        let units = units(
            &slices,
            entry_slices == 1,
            256 / entry_rows * scales.bytes_per_entry(),
        )?;
        Ok(Self {
            scales,
            entry_rows,
            out_features,
            in_features,
            units,
            features,
            source_rows,
            groups: slices
                .chunks(entry_slices)
                .map(|part| part[0].group)
                .collect(),
            maxima: Vec::new(),
        })
    }
}

/// The slices in their order. All slices of a chunk have one width.
///
/// Slices that form a run of one group come first, so that other groups do not shift runs; then come the others, which are paired. Both are
/// ordered by width, in the order in which widths first appear.
fn ordered(slices: &[Slice]) -> Vec<Slice> {
    let mut widths: Vec<Width> = Vec::new();
    for slice in slices {
        match widths.iter_mut().find(|width| width.bits == slice.bits) {
            Some(width) => width.others.push(slice.clone()),
            None => widths.push(Width::new(slice)),
        }
    }
    for width in &mut widths {
        width.move_runs();
    }
    make_pairs(&mut widths);
    let wide = take_wide(&mut widths);
    let (runs, others): (Vec<_>, Vec<_>) = widths
        .into_iter()
        .map(|width| (width.runs, width.others))
        .unzip();
    let rest: Vec<Slice> = runs.into_iter().chain(others).flatten().collect();
    spread(&wide, rest)
}

/// The slices of one width, those that form runs of one group and the others.
struct Width {
    bits: u32,
    runs: Vec<Slice>,
    others: Vec<Slice>,
}

impl Width {
    fn new(first: &Slice) -> Self {
        Self {
            bits: first.bits,
            runs: Vec::new(),
            others: vec![first.clone()],
        }
    }

    fn len(&self) -> usize {
        self.runs.len() + self.others.len()
    }

    fn move_runs(&mut self) {
        let mut left = std::mem::take(&mut self.others).into_iter().peekable();
        while let Some(slice) = left.next() {
            let mut run = vec![slice];
            while run.len() < RUN
                && let Some(next) = left.next_if(|next| next.group == run[0].group)
            {
                run.push(next);
            }
            if run.len() == RUN {
                self.runs.append(&mut run);
            } else {
                self.others.append(&mut run);
            }
        }
    }
}

/// Makes the number of slices outside of runs even. A width with an odd number has the first slice of a narrower one, whose codes are
/// stored with more bits, so that no rows of padding are needed: without them an input can be packed by the launch that computes it.
fn make_pairs(widths: &mut [Width]) {
    for i in 0..widths.len() {
        if widths[i].others.len().is_multiple_of(2) {
            continue;
        }
        let bits = widths[i].bits;
        let (before, after) = widths.split_at_mut(i + 1);
        let others = &mut before[i].others;
        let narrower = after
            .iter_mut()
            .find(|width| width.bits < bits && !width.others.is_empty());
        let second = match narrower {
            Some(width) => width.others.remove(0),
            None => Slice {
                rows: [-1; SLICE_ROWS],
                ..others[others.len() - 1].clone()
            },
        };
        others.push(Slice { bits, ..second });
    }
}

/// The slices of the widest width, if it has few of them and at least twice the bits of the most frequent width.
fn take_wide(widths: &mut [Width]) -> Vec<Slice> {
    let all: usize = widths.iter().map(Width::len).sum();
    let frequent = widths.iter().max_by_key(|width| width.len());
    let frequent = frequent.map_or(0, |width| width.bits);
    match widths.iter_mut().max_by_key(|width| width.bits) {
        Some(width) if width.bits >= 2 * frequent && width.len() * FEWEST_TO_WIDE <= all => {
            let mut wide = std::mem::take(&mut width.runs);
            wide.append(&mut width.others);
            wide
        }
        _ => Vec::new(),
    }
}

/// Spreads `wide` evenly over the units: rings of stages have room for the largest stage in every slot. A unit has four slices of them at most.
fn spread(wide: &[Slice], mut rest: Vec<Slice>) -> Vec<Slice> {
    let units = (wide.len() + rest.len()).div_ceil(UNIT_SLICES);
    let wide: Vec<_> = wide.chunks(UNIT_SLICES / 2).collect();
    let count = wide.len();
    let mut places = (0..count).map(|i| (2 * i + 1) * units / (2 * count));
    let mut next = places.next();
    // The slices that share units with wide ones are the last.
    let shared: usize = wide.iter().map(|part| UNIT_SLICES - part.len()).sum();
    let mut partners = rest
        .split_off(rest.len().saturating_sub(shared))
        .into_iter();
    let mut rest = rest.into_iter();
    let mut wide = wide.into_iter();
    let mut all = Vec::new();
    for unit in 0..units {
        if next == Some(unit) {
            let part = wide.next().unwrap_or_default();
            all.extend_from_slice(part);
            all.extend(partners.by_ref().take(UNIT_SLICES - part.len()));
            next = places.next();
        } else {
            all.extend(rest.by_ref().take(UNIT_SLICES));
        }
    }
    all.extend(rest);
    all
}

const UNIT_SLICES: usize = UNIT_ROWS / SLICE_ROWS;
/// Slices of all widths for each one of a wide width.
const FEWEST_TO_WIDE: usize = 8;

/// Slices of the rows of a scale where groups have at least as many.
const RUN: usize = 4;

/// Whether some groups of an EXL2 matrix have fewer rows than [`RUN`] slices, or begin within such a run: a scale is then stored for every
/// slice.
pub fn has_fine_scales(groups: &[Group]) -> bool {
    !share_groups(&ordered(&slices_of(groups)))
}

fn slices_of(groups: &[Group]) -> Vec<Slice> {
    let mut slices = Vec::new();
    for (g, group) in groups.iter().enumerate() {
        let rows: Vec<i32> = group.rows.clone().map(|row| row as i32).collect();
        slices.extend(Slice::of_group(group.bits, g as u32, &rows));
    }
    slices
}

/// Whether every aligned run of slices lies in one group.
fn share_groups(slices: &[Slice]) -> bool {
    slices
        .chunks(RUN)
        .all(|part| part.iter().all(|slice| slice.group == part[0].group))
}

/// `fine`: every slice has an entry of its own.
fn units(slices: &[Slice], fine: bool, scale_bytes: usize) -> Result<Vec<Unit>, Problem> {
    let mut units = Vec::new();
    let mut offset = 0usize;
    for part in slices.chunks(UNIT_SLICES) {
        let bits = || part.chunks(2).map(|chunk| chunk[0].bits);
        let mut widths = bits().enumerate().map(|(c, b)| b << (4 * c)).sum();
        if fine && share_groups(part) {
            widths |= ONE_SCALE_A_HALF;
        }
        units.push(Unit {
            offset: offset as u32,
            widths,
        });
        offset += 128 * bits().sum::<u32>() as usize + scale_bytes;
    }
    let limit = u32::MAX as usize / 2;
    if offset > limit {
        return Err(Problem::TileTooLarge {
            bytes: offset,
            limit,
        });
    }
    units.push(Unit {
        offset: offset as u32,
        widths: 0,
    });
    Ok(units)
}
