//! `wgmma` against a plain loop, over the layouts of shared memory that descriptors can name, and planted faults.

mod common;

use common::one_block;
use exl_ptx::card::Card;
use exl_ptx::grid::run;
use exl_ptx::memory::Ranges;
use exl_ptx::module::Module;
use half::f16;

const ROWS: usize = 64;
const DEPTH: usize = 16;
const COLUMNS: usize = 128;
/// Bytes of the images of A and B in shared memory.
const A_BYTES: usize = 8192;
const B_BYTES: usize = 16384;
const FENCE: &str = "fence.proxy.async.shared::cta;\nbar.sync 0;";
const WAIT: &str = "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;";

/// A place of value `k` of row (column) `at`, in bytes, and the descriptor without its address.
struct Layout {
    place: fn(at: usize, k: usize) -> usize,
    leading: usize,
    stride: usize,
    swizzle: u64,
    transposed: bool,
}

impl Layout {
    fn descriptor(&self) -> u64 {
        (self.leading as u64 / 16) << 16 | (self.stride as u64 / 16) << 32 | self.swizzle << 62
    }

    fn image(&self, bytes: usize, rows: usize, value: impl Fn(usize, usize) -> f32) -> Vec<u8> {
        let mut image = vec![0u8; bytes];
        for at in 0..rows {
            for k in 0..DEPTH {
                let to = (self.place)(at, k);
                image[to..to + 2].copy_from_slice(&f16::from_f32(value(at, k)).to_le_bytes());
            }
        }
        image
    }
}

/// Core matrices of 8 rows of 16 bytes: those of K side by side, 1,024 or 2,048 bytes apart.
const PLAIN: Layout = Layout {
    place: |at, k| at * 16 + k / 8 * 2048 + k % 8 * 2,
    leading: 2048,
    stride: 128,
    swizzle: 0,
    transposed: false,
};
const PLAIN_TRANSPOSED: Layout = Layout {
    place: |at, k| at / 8 * 128 + k / 8 * 2048 + k % 8 * 16 + at % 8 * 2,
    leading: 2048,
    stride: 128,
    swizzle: 0,
    transposed: true,
};
/// Rows of 128 bytes whose eight chunks are in an order that depends on the row.
const SWIZZLED: Layout = Layout {
    place: |at, k| at * 128 + ((k / 8) ^ (at % 8)) * 16 + k % 8 * 2,
    leading: 16,
    stride: 1024,
    swizzle: 1,
    transposed: false,
};
/// Values of K one after another, 64 columns in 128 bytes; the next 64 columns after them.
const SWIZZLED_TRANSPOSED: Layout = Layout {
    place: |at, k| at / 64 * 8192 + k * 128 + ((at % 64 / 8) ^ (k % 8)) * 16 + at % 8 * 2,
    leading: 8192,
    stride: 1024,
    swizzle: 1,
    transposed: true,
};

fn list(name: &str, first: usize, count: usize) -> String {
    let names: Vec<String> = (first..first + count)
        .map(|n| format!("%{name}{n}"))
        .collect();
    format!("{{{}}}", names.join(", "))
}

/// One warpgroup copies the images to shared memory and multiplies twice, the second time adding to the sums.
fn kernel(a: &Layout, b: &Layout, a_in_registers: bool, fence: &str, wait: &str) -> String {
    let sums = list("f", 0, COLUMNS / 2);
    let (left, signs) = if a_in_registers {
        let from = "add.s32 %r9, %r9, %r4;\nld.shared.u32 %r10, [%r9];\nld.shared.u32 %r11, [%r9+128];\n\
                    ld.shared.u32 %r12, [%r9+2048];\nld.shared.u32 %r13, [%r9+2176];\n";
        (from, format!("p, 1, 1, {}", u8::from(b.transposed)))
    } else {
        let signs = format!(
            "p, 1, 1, {}, {}",
            u8::from(a.transposed),
            u8::from(b.transposed)
        );
        ("", signs)
    };
    let operand = if a_in_registers {
        "{%r10, %r11, %r12, %r13}"
    } else {
        "%rd5"
    };
    let multiply = format!(
        "wgmma.mma_async.sync.aligned.m64n{COLUMNS}k16.f32.f16.f16 {sums}, {operand}, %rd6, {signs};\n"
    );
    let stores: Vec<String> = (0..COLUMNS / 2)
        .map(|n| format!("st.global.f32 [%rd4+{}], %f{n};", 4 * n))
        .collect();
    let stores = stores.join("\n");
    format!(
        ".version 9.0\n.target sm_90a\n.address_size 64\n\
         .visible .entry test(.param .u64 out, .param .u64 from)\n{{\n\
         .reg .b32 %r<20>;\n.reg .b64 %rd<12>;\n.reg .pred %p<4>;\n.reg .pred p;\n.reg .f32 %f<64>;\n\
         .shared .align 1024 .b8 held[{total}];\n\
         ld.param.u64 %rd1, [out];\nld.param.u64 %rd2, [from];\nmov.u32 %r2, %tid.x;\nmov.u32 %r3, held;\n\
         mov.u32 %r5, %r2;\n\
         COPY:\nshl.b32 %r6, %r5, 2;\ncvt.u64.u32 %rd3, %r6;\nadd.s64 %rd3, %rd2, %rd3;\nld.global.u32 %r7, [%rd3];\n\
         add.s32 %r8, %r3, %r6;\nst.shared.u32 [%r8], %r7;\nadd.s32 %r5, %r5, 128;\nsetp.lt.u32 %p1, %r5, {words};\n\
         @%p1 bra COPY;\n{fence}\n\
         and.b32 %r4, %r2, 31;\nshr.u32 %r14, %r4, 2;\nshl.b32 %r14, %r14, 4;\nand.b32 %r4, %r4, 3;\nshl.b32 %r4, %r4, 2;\n\
         add.s32 %r4, %r4, %r14;\nshr.u32 %r9, %r2, 5;\nshl.b32 %r9, %r9, 8;\nadd.s32 %r9, %r9, %r3;\n{left}\
         shr.u32 %r15, %r3, 4;\ncvt.u64.u32 %rd5, %r15;\nadd.s64 %rd6, %rd5, {b_at};\n\
         or.b64 %rd5, %rd5, {a_bits};\nor.b64 %rd6, %rd6, {b_bits};\n\
         wgmma.fence.sync.aligned;\nsetp.ne.u32 p, %r3, %r3;\n{multiply}setp.eq.u32 p, %r3, %r3;\n{multiply}\
         {wait}\n\
         mul.wide.u32 %rd4, %r2, {out_bytes};\nadd.s64 %rd4, %rd1, %rd4;\n{stores}\nret;\n}}\n",
        total = A_BYTES + B_BYTES,
        words = (A_BYTES + B_BYTES) / 4,
        b_at = A_BYTES / 16,
        a_bits = a.descriptor(),
        b_bits = b.descriptor(),
        out_bytes = 2 * COLUMNS,
    )
}

/// The sums, row after row.
fn outcome_of(text: &str, image: &[u8], seed: u64) -> Result<Vec<f32>, String> {
    let mut out = vec![0f32; ROWS * COLUMNS];
    let mut ranges = Ranges::default();
    ranges.add(out.as_mut_ptr() as u64, 4 * out.len() as u64);
    ranges.add(image.as_ptr() as u64, image.len() as u64);
    let kernel = Module::load(text, &mut ranges)?.kernel("test")?;
    let mut params = (out.as_mut_ptr() as u64).to_le_bytes().to_vec();
    params.extend_from_slice(&(image.as_ptr() as u64).to_le_bytes());
    let launch = one_block(128, params, seed);
    run(
        &kernel,
        &launch,
        &Card::named("h100").expect("a known card"),
        &ranges,
    )?;
    let mut rows = vec![0f32; ROWS * COLUMNS];
    for (thread, sums) in out.chunks(COLUMNS / 2).enumerate() {
        let (warp, lane) = (thread / 32, thread % 32);
        for (number, &sum) in sums.iter().enumerate() {
            let row = 16 * warp + lane / 4 + number % 4 / 2 * 8;
            rows[row * COLUMNS + number / 4 * 8 + lane % 4 * 2 + number % 2] = sum;
        }
    }
    Ok(rows)
}

/// Whole numbers, so that sums are exact in any order.
fn left(row: usize, k: usize) -> f32 {
    ((row * 7 + k * 3) % 23) as f32 - 11.0
}

fn right(column: usize, k: usize) -> f32 {
    ((column * 5 + k * 11) % 19) as f32 - 9.0
}

fn image_of(a: &Layout, b: &Layout) -> Vec<u8> {
    let mut image = a.image(A_BYTES, ROWS, left);
    image.extend(b.image(B_BYTES, COLUMNS, right));
    image
}

#[test]
fn every_layout_gives_the_sums() {
    for (a, b, a_in_registers) in [
        (PLAIN, PLAIN, false),
        (PLAIN, PLAIN, true),
        (PLAIN, PLAIN_TRANSPOSED, true),
        (PLAIN_TRANSPOSED, PLAIN, false),
        (SWIZZLED, SWIZZLED, false),
        (SWIZZLED_TRANSPOSED, PLAIN, false),
        (PLAIN, SWIZZLED_TRANSPOSED, true),
        (SWIZZLED, SWIZZLED_TRANSPOSED, false),
    ] {
        let text = kernel(&a, &b, a_in_registers, FENCE, WAIT);
        let found = outcome_of(&text, &image_of(&a, &b), 1).expect("a correct kernel");
        for row in 0..ROWS {
            for column in 0..COLUMNS {
                let sum: f32 = (0..DEPTH).map(|k| left(row, k) * right(column, k)).sum();
                assert_eq!(
                    found[row * COLUMNS + column],
                    2.0 * sum,
                    "row {row}, column {column}"
                );
            }
        }
    }
}

#[test]
fn a_missing_fence_after_stores_is_found() {
    let text = kernel(&PLAIN, &PLAIN, false, "bar.sync 0;", WAIT);
    let why = outcome_of(&text, &image_of(&PLAIN, &PLAIN), 0).expect_err("no fence");
    assert!(why.contains("without a `fence.proxy.async`"), "{why}");
}

#[test]
fn a_store_before_the_wait_is_found() {
    let image = image_of(&PLAIN, &PLAIN);
    // B's first value, and bytes after A that no instruction reads.
    let (read, unread) = (A_BYTES, A_BYTES - 1024);
    let store = |to: usize| format!("st.shared.u32 [%r3+{to}], %r7;\n");
    let early = |to: usize| {
        WAIT.replace(
            "wgmma.wait_group",
            &format!("{}wgmma.wait_group", store(to)),
        )
    };
    let outcome = |wait: &str| outcome_of(&kernel(&PLAIN, &PLAIN, false, FENCE, wait), &image, 0);

    outcome(&format!("{WAIT}\nbar.sync 0;\n{}", store(read))).expect("a store after the wait");
    outcome(&early(unread)).expect("a store to bytes that no instruction reads");
    let why = outcome(&early(read)).expect_err("a store before the wait");
    assert!(why.contains("may still read"), "{why}");
    let one_pending = WAIT.replace("wait_group.sync.aligned 0", "wait_group.sync.aligned 1");
    let why = outcome(&format!("{one_pending}\nbar.sync 0;\n{}", store(read)));
    assert!(why.is_err(), "the group may be unfinished");
}
