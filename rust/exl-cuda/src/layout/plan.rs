//! The order of a checked matrix's rows.

use exl_format::exl2::{Exl2View, Group};
use exl_format::gptq::GptqView;

use super::{CHUNKS_PER_UNIT, Layout, ONE_SCALE_A_HALF, SLICE_ROWS, Scales, Unit};

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
        let slices = in_pairs(slices);
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

/// The slices ordered by width; each width is padded to an even number. Widths whose slices mostly lie in runs of one group come first, so
/// that small groups of other widths do not shift these runs; else widths have the order in which they first appear.
fn in_pairs(slices: &[Slice]) -> Vec<Slice> {
    let mut widths: Vec<(u32, Vec<Slice>)> = Vec::new();
    for slice in slices {
        match widths.iter_mut().find(|(bits, _)| *bits == slice.bits) {
            Some((_, found)) => found.push(slice.clone()),
            None => widths.push((slice.bits, vec![slice.clone()])),
        }
    }
    for (bits, slices) in &mut widths {
        if slices.len() % 2 == 1 {
            let last = slices[slices.len() - 1].group;
            slices.extend(Slice::of_group(*bits, last, &[-1; SLICE_ROWS]));
        }
    }
    let mostly_runs = |slices: &[Slice]| {
        let runs = slices.chunks(RUN);
        2 * runs.clone().filter(|run| share_groups(run)).count() > runs.len()
    };
    let (first, last): (Vec<_>, Vec<_>) = widths
        .into_iter()
        .partition(|(_, slices)| mostly_runs(slices));
    let ordered = first.into_iter().chain(last);
    ordered.flat_map(|(_, slices)| slices).collect()
}

/// Slices of the rows of a scale where groups have at least as many.
const RUN: usize = 4;

/// Whether some groups of an EXL2 matrix have fewer rows than [`RUN`] slices, or begin within such a run: a scale is then stored for every
/// slice.
pub fn has_fine_scales(groups: &[Group]) -> bool {
    !share_groups(&in_pairs(&slices_of(groups)))
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
    for part in slices.chunks(2 * CHUNKS_PER_UNIT) {
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
