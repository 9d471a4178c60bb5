//! Experts of EXL2 or GPTQ matrices in shared launches.

use super::plan::{Form, Matmul};
use super::{CallArgument, Launches};
use crate::abi::assert_layout;
use crate::capabilities::Capabilities;
use crate::features::Feature;
use crate::launch::CudaError;
use crate::layout::UNIT_ROWS;
use crate::ops::linear::{Matrix, MatrixArgument};
use crate::parameters::kernels;

/// Most units of a matrix: a lane of a warp names one of a quarter of them, and its offset is a multiple of 16 in 16 bits.
const MOST_UNITS: usize = 128;
const _: () = assert!(MOST_UNITS / 4 <= 32 && MOST_UNITS * (128 * 32 + 512) <= 16 << 16);

/// `struct Expert` of `kernels/moe/experts.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpertArgument {
    gate: MatrixArgument,
    up: MatrixArgument,
    down: MatrixArgument,
    gate_features: usize,
    up_features: usize,
    down_features: usize,
}

assert_layout!(ExpertArgument, experts::Expert, { gate, up, down, gate_features, up_features, down_features });

/// The matrices of a layer's experts.
#[derive(Clone, Debug)]
pub(super) struct Quantized {
    pub entries: Vec<ExpertArgument>,
    pub kind: &'static str,
    pub entry_rows: usize,
    /// Packed copies of a row: gate and up share one if their rows of K have the same order.
    pub inputs: usize,
    /// Rows of K of the packed inputs, in whole units.
    pub x_stride: usize,
    pub inner_stride: usize,
    /// The matmul of gate and up, and that of down.
    pub matmuls: [Matmul; 2],
    /// Forms that the card has kernels and shared memory for.
    pub forms: Vec<Form>,
    /// SMs of the card, and bytes of shared memory of a block there.
    pub card: [usize; 2],
    /// No matrix has a bias or a factor, so that a dequantized matrix is all of it.
    pub plain: bool,
    /// Most rows of the layout of gate, up and down.
    pub layout_rows: [usize; 3],
}

impl Quantized {
    /// Experts of one card, each (gate, up, down), of equal sizes. The error says why shared launches cannot take them.
    pub fn new(experts: &[[&Matrix; 3]], caps: &Capabilities) -> Result<Self, String> {
        let gate = experts[0][0];
        let other = |m: &&Matrix| m.kind != gate.kind || m.entry_rows != gate.entry_rows;
        if let Some(number) = experts.iter().position(|parts| parts.iter().any(other)) {
            return Err(format!(
                "expert {number} is stored in another format, or with other groups, than expert 0"
            ));
        }
        let all = |parts: &[usize]| -> Vec<&Matrix> {
            experts
                .iter()
                .flat_map(|e| parts.iter().map(|&part| e[part]))
                .collect()
        };
        let rows = |parts: &[usize]| all(parts).iter().map(|m| m.rows()).max().unwrap_or(0);
        let stride = |parts: &[usize]| rows(parts).next_multiple_of(UNIT_ROWS);
        let matmuls = [
            Matmul::new("gate_up", 2, &all(&[0, 1])),
            Matmul::new("down", 1, &all(&[2])),
        ];
        let card = [caps.sms, caps.shared_per_block];
        let fitting = |form: &Form| {
            let fits = |matmul: &Matmul| matmul.fits(*form, caps.shared_per_block);
            matmuls.iter().all(fits) && (form.tiles() == 1 || caps.has(Feature::BulkCopy))
        };
        let forms: Vec<Form> = Form::QUANTIZED.into_iter().filter(fitting).collect();
        if forms.is_empty() {
            return Err(format!(
                "their units and sums do not fit {} bytes of shared memory",
                caps.shared_per_block
            ));
        }
        let most = all(&[0, 1, 2]).iter().map(|m| m.argument.unit_count).max();
        if most > Some(MOST_UNITS as i32) {
            return Err(format!(
                "inputs of {} rows, more than {}",
                rows(&[0, 1, 2]),
                MOST_UNITS * UNIT_ROWS
            ));
        }
        let alike = experts
            .iter()
            .all(|[g, u, _]| g.features_host == u.features_host);
        let bare =
            |m: &&Matrix| m.argument.bias == 0 && m.argument.prescale.to_bits() == 1f32.to_bits();
        Ok(Self {
            entries: experts
                .iter()
                .map(|[g, u, d]| ExpertArgument {
                    gate: g.argument,
                    up: u.argument,
                    down: d.argument,
                    gate_features: g.features,
                    up_features: u.features,
                    down_features: d.features,
                })
                .collect(),
            kind: gate.kind,
            entry_rows: gate.entry_rows,
            inputs: if alike { 1 } else { 2 },
            x_stride: stride(&[0, 1]),
            inner_stride: stride(&[2]),
            matmuls,
            forms,
            card,
            plain: all(&[0, 1, 2]).iter().all(bare),
            layout_rows: [rows(&[0]), rows(&[1]), rows(&[2])],
        })
    }

    /// The kernels of gate and up, and of down.
    pub fn names(&self, form: Form) -> [String; 2] {
        let matmuls = self.matmuls.each_ref();
        matmuls.map(|matmul| self.matmul_name(matmul, form))
    }

    fn matmul_name(&self, matmul: &Matmul, form: Form) -> String {
        let (name, kind, entry_rows) = (matmul.name, self.kind, self.entry_rows);
        format!("experts_{name}_{kind}_{entry_rows}_{}", form.suffix())
    }

    /// Columns of packed inputs of `pairs` pairs: room for the last item of each expert.
    pub fn columns(&self, pairs: usize, form: Form) -> usize {
        pairs + (form.rows() - 1) * self.entries.len()
    }

    /// Blocks that pack inputs, and the shared memory of an SM that their launch asks for: as the next one, so that SMs need not change over.
    pub fn packing(&self, pairs: usize, form: Form) -> (u32, usize) {
        let of_sm = self.matmuls[0].launch(1, form, self.card).of_sm;
        ((pairs * self.inputs) as u32, of_sm)
    }

    /// Launch the matmuls of at most `items` items.
    ///
    /// # Safety
    /// As for [`super::run`].
    pub unsafe fn multiply(
        &self,
        to: &Launches,
        mut argument: CallArgument,
        items: usize,
        form: Form,
    ) -> Result<(), CudaError> {
        // No launch may come between the two: see `expert_product`.
        for matmul in &self.matmuls {
            let plan = matmul.launch(items, form, self.card);
            argument.tiles = matmul.tiles as i32;
            argument.unit_bytes = matmul.unit_bytes as i32;
            let name = self.matmul_name(matmul, form);
            let launch = to.launch(&name, [plan.blocks, 1, 1], plan.threads, plan.shared);
            let mut arguments = kernels::Experts { call: argument };
            // SAFETY: the caller guarantees that the addresses are valid.
            unsafe { launch.run_with_shared(to.device, Some(plan.of_sm), &mut arguments)? };
        }
        Ok(())
    }
}
