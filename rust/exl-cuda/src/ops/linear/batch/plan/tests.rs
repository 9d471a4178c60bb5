use super::*;
use crate::capabilities::tests::hopper;
use crate::ops::linear::tests::matrix;

#[test]
fn the_plan_of_an_8b_layer_at_four_bits() {
    let mut up = matrix(16, 2064);
    up.argument.tiles = 896;
    up.argument.out_features = 14336;
    let o = matrix(16, 2064);
    let shares_of = |m, matrices: &[&Matrix]| {
        plan(&hopper(), matrices, m, false, Tuning::default())
            .expect("fits")
            .shares
    };
    let mut head = matrix(16, 3088);
    head.argument.tiles = 8016;
    head.argument.out_features = 128_256;
    let logits = shares_of(64, &[&head]);
    assert_eq!((logits.items, logits.cut, logits.groups), (2004, 1, 3));
    assert_eq!((logits.rounds, logits.blocks), (6, 132));
    assert_eq!((logits.columns, logits.warpgroups), (64, 3));
    assert_eq!((logits.left, logits.family()), (24, "gemm_batch_whole"));
    assert_eq!(logits.sums(), 24 * 65536);
    let pair = shares_of(64, &[&up, &up]);
    assert_eq!((pair.items, pair.cut, pair.groups), (448, 1, 2));
    assert_eq!((pair.left, pair.family()), (0, "gemm_batch"));
    let gated = plan(&hopper(), &[&up, &up], 64, true, Tuning::default()).expect("fits");
    assert_eq!((gated.shares.left, gated.shares.groups), (0, 2));
    assert_eq!(shares_of(32, &[&up, &up]).left, 0);
    let alone = shares_of(32, &[&o]);
    assert_eq!((alone.items, alone.cut, alone.groups), (64, 4, 2));
    assert_eq!((alone.rounds, alone.blocks), (1, 128));
    assert_eq!(shares_of(16, &[&o]).columns, 16);
}

#[test]
fn the_division_of_128_columns_takes_fewest_cycles() {
    let shares_of = |units, tiles, count: usize| {
        let mut made = matrix(units, 2064);
        made.argument.tiles = tiles;
        let matrices = [&made, &made];
        let found = plan(&hopper(), &matrices[..count], 128, false, Tuning::default());
        let shares = found.expect("fits").shares;
        (shares.cut, shares.groups, shares.blocks, shares.rounds)
    };
    assert_eq!(shares_of(16, 384, 1), (4, 2, 132, 2), "q, k, v");
    assert_eq!(shares_of(16, 256, 1), (4, 2, 128, 1), "o");
    assert_eq!(shares_of(16, 896, 1), (1, 2, 112, 1), "up");
    assert_eq!(shares_of(16, 896, 2), (1, 2, 132, 2), "gate and up");
    assert_eq!(shares_of(56, 256, 1), (4, 2, 128, 1), "down");
    assert_eq!(shares_of(16, 8016, 1), (1, 2, 132, 8), "head");
}

#[test]
fn sms_that_the_matmuls_of_a_layer_leave_free() {
    let left = |m, features| left_alone(&hopper(), m, features);
    for m in [9, 16, 17, 32, 33, 64] {
        for made in [matrix(16, 2064), matrix(56, 2064)] {
            let found = plan(&hopper(), &[&made], m, false, Tuning::default()).expect("fits");
            assert_eq!(left(m, made.out_features()), 132 - found.shares.blocks);
        }
        // Whole groups of four, unless blocks process all of K.
        assert!((64..16384).step_by(64).all(|n| left(m, n) % QUARTERS == 0));
        assert_eq!((left(m, 16384), left(m, 16896)), (4, 0));
    }
    assert_eq!((left(64, 4096), left(64, 5120)), (4, 24));
    assert_eq!((left(64, 2048), left(64, 64)), (4, 128));
}

/// The matrix of the test of leftover items in tests/kernels/test_cuda_linear.py, which the sanitizer runs for this kernel.
#[test]
fn the_matrix_of_a_test_has_leftover_items() {
    let mut made = matrix(8, 2064);
    made.argument.out_features = 64 * 400 + 24;
    made.argument.tiles = (made.argument.out_features + 15) / 16;
    for m in [49, 64] {
        let found = plan(&hopper(), &[&made], m, false, Tuning::default()).expect("fits");
        let shares = found.shares;
        assert_eq!(
            (shares.items, shares.blocks, shares.left),
            (401, 132, 5),
            "{m}"
        );
        assert_eq!(shares.family(), "gemm_batch_whole");
    }
}

#[test]
fn activations_of_128_columns_have_a_ring_of_their_own() {
    for (units, bytes, gated, slots) in [
        (16, 2064, true, (4, 3)),
        (16, 4112, true, (2, 3)),
        (16, 2064, false, (3, 4)),
        (56, 2576, false, (4, 3)),
    ] {
        let mut made = matrix(units, bytes);
        made.argument.tiles = if gated { 896 } else { 256 };
        let matrices = [&made, &made];
        let count = if gated { 2 } else { 1 };
        let found =
            plan(&hopper(), &matrices[..count], 128, gated, Tuning::default()).expect("fits");
        let task = found.task;
        assert_eq!((task.slots, task.half_slots), slots, "{bytes} {gated}");
        assert_eq!(task.resident, 0);
        let ring = task.x_at as usize + task.half_slots as usize * unit_bytes(128) / 2;
        assert_eq!(task.ring_at as usize, ring);
    }
}

#[test]
fn a_plan_fits_the_shared_memory() {
    for (units, bytes) in [
        (1, 1040),
        (3, 4112),
        (16, 4112),
        (56, 2064),
        (56, 4112),
        (255, 4160),
    ] {
        let made = matrix(units, bytes);
        for m in 1..=BLOCK_ROWS {
            for together in [vec![&made], vec![&made, &made], vec![&made; 3]] {
                let plan = plan(&hopper(), &together, m, false, Tuning::default())
                    .expect("two stages fit at eight bits");
                assert!(plan.shared <= 232_192, "{units} {bytes} {m}");
                assert!(plan.shares.blocks <= 132 && plan.shares.groups <= 4);
                assert!((plan.task.barriers_at as usize) < plan.shared);
            }
        }
    }
}

/// The items of each share, as `place` of `kernels/linear/batch_task.cuh` finds them.
fn items_of(shares: &Shares) -> Vec<Vec<usize>> {
    let each = shares.groups / if shares.gated { 2 } else { 1 };
    (0..shares.dealt())
        .map(|share| {
            let after = share.saturating_sub(shares.full);
            let first = share.min(shares.full) * each + after * shares.last_items;
            let most = if share < shares.full {
                each
            } else {
                shares.last_items
            };
            (first..(first + most.min(each)).min(shares.items)).collect()
        })
        .collect()
}

#[test]
fn the_last_round_is_spread_over_all_blocks() {
    let divided = |m, tiles, count: usize, gated| {
        let mut made = matrix(14, 2064);
        made.argument.tiles = tiles;
        made.argument.out_features = 16 * tiles;
        let matrices = [&made, &made];
        let found = plan(&hopper(), &matrices[..count], m, gated, Tuning::default());
        let found = found.expect("fits").shares;
        (found.groups, found.rounds, found.full, found.last_items)
    };
    assert_eq!(divided(32, 1184, 2, true), (4, 2, 132, 1), "Qwen2.5's gate");
    assert_eq!(divided(16, 1184, 2, true).0, 2, "faster, by measurement");
    assert_eq!(divided(64, 1184, 2, true).0, 2);
    assert_eq!(divided(32, 896, 2, true), (4, 1, 112, 2), "Llama's gate");
    assert_eq!(divided(32, 384, 1, false), (3, 1, 32, 3), "Llama's q, k, v");
    assert_eq!(divided(32, 576, 1, false), (3, 2, 33, 2), "Phi-3's q, k, v");
    assert_eq!(
        divided(32, 9504, 1, false),
        (4, 5, 528, 2),
        "Qwen2.5's head"
    );
    assert_eq!(
        divided(64, 9504, 1, false),
        (3, 6, 792, 3),
        "the same of 64 rows, whose last round stays whole"
    );
}

#[test]
fn every_number_of_rows_has_a_kernel() {
    for code in [Code::Wgmma, Code::Mma] {
        for m in 1..=code.most_rows() {
            let columns = code.columns(m);
            assert!(m <= columns, "{code:?} {m}");
            for gated in [false, true] {
                let made = matrix(16, 2064);
                let matrices = [&made, &made];
                let tuning = Tuning::default();
                let shares = Shares::new(&hopper(), code, &matrices, m, gated, tuning);
                let variant = (shares.columns, shares.warpgroups);
                assert!(
                    code.variants().contains(&variant),
                    "{code:?} {m} {variant:?}"
                );
            }
        }
    }
    assert_eq!(Code::Wgmma.columns(33), MIDDLE_ROWS);
    assert_eq!(Code::Mma.columns(33), PACKED_ROWS);
}

proptest::proptest! {
    #[test]
    fn every_item_is_in_one_share(
        tiles in 1i32..2500, m in 9usize..129, gated: bool, mma: bool, units in 1usize..20,
    ) {
        let mut made = matrix(units, 2064);
        made.argument.tiles = tiles;
        made.argument.out_features = 16 * tiles;
        let matrices = [&made, &made];
        let count = if gated { 2 } else { 1 };
        let code = if mma { Code::Mma } else { Code::Wgmma };
        let m = if mma { m.min(64) } else { m };
        let found = Shares::new(&hopper(), code, &matrices[..count], m, gated, Tuning::default());
        let all: Vec<usize> = items_of(&found).concat();
        proptest::prop_assert_eq!(all, (0..found.items).collect::<Vec<_>>());
        let of_blocks = found.dealt().div_ceil(found.blocks / found.cut);
        proptest::prop_assert_eq!(of_blocks, found.rounds);
    }
}
