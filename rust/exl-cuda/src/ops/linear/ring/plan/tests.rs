use super::super::rows;
use super::*;
use crate::capabilities::tests::{RELEASE, card, hopper};
use crate::ops::linear::tests::matrix;

const GATED: Epilogue = Epilogue {
    gate: true,
    activation: false,
    norm: false,
    layer: false,
    residual: false,
    bf16: false,
    adapters: None,
};

#[test]
fn the_ring_of_four_bits_has_the_measured_size() {
    let made = matrix(16, 2064);
    let plan = plan(&hopper(), &[&made], 1, Epilogue::default(), None).expect("fits");
    assert_eq!((plan.task.slots, plan.task.window), (9, 2));
    assert!((LEAST_SHARED..232_448 - 1024).contains(&plan.shared));
    assert_eq!(rows(&hopper(), &[&made], Epilogue::default()), 8);
    assert_eq!(plan.task.stage_begin[0][..3], [0, 8 * 2064, 16 * 2064]);
}

#[test]
fn a_ring_fits_the_shared_memory() {
    for (units, bytes) in [(1, 1040), (16, 4112), (56, 2064), (56, 4112), (255, 4160)] {
        let made = matrix(units, bytes);
        for m in 1..=FEW_ROWS {
            for together in [vec![&made], vec![&made, &made, &made]] {
                if let Ok(plan) = plan(&hopper(), &together, m, Epilogue::default(), None) {
                    let task = plan.task;
                    assert!(plan.shared <= 232_448 - 1024);
                    assert!((1..=task.slots - SPARE_SLOTS as i32).contains(&task.window));
                    assert!(task.parts.iter().all(|p| p.order == 0), "one copy");
                    assert_eq!(task.flags >> FILLS, 1, "one copy");
                }
            }
        }
    }
    assert_eq!(
        rows(&hopper(), &[&matrix(255, 4160)], Epilogue::default()),
        0
    );
    let ampere = card("3090", RELEASE);
    assert_eq!(rows(&ampere, &[&matrix(16, 2064)], Epilogue::default()), 0);
}

#[test]
fn long_tiles_of_four_rows_leave_slots_beyond_the_window() {
    // 7 stages, the first of wide units: a window of two of its four slots would deadlock.
    let mut made = matrix(56, 2064);
    for (u, offset) in made.unit_offsets.iter_mut().enumerate() {
        *offset += 512 * u.min(7) as u32;
    }
    made.argument.tile_bytes += 7 * 512;
    let plan = plan(&hopper(), &[&made], 4, Epilogue::default(), None).expect("fits");
    assert_eq!((plan.task.slots, plan.task.window), (4, 1));
}

#[test]
fn only_blocks_of_many_tiles_keep_a_unit_per_warp() {
    let planned = |matrix: &Matrix, count: usize, gated| {
        let epilogue = Epilogue {
            gate: gated,
            ..Epilogue::default()
        };
        plan(&hopper(), &vec![matrix; count], 1, epilogue, None).expect("fits")
    };
    let sized = |units, out_features: i32| {
        let mut made = matrix(units, 2064);
        made.argument.out_features = out_features;
        made.argument.tiles = out_features / 16;
        made
    };
    let gate_up = planned(&sized(16, 14336), 2, true);
    assert_eq!(gate_up.task.flags & KEEP, KEEP);
    assert_eq!((gate_up.deal.blocks, gate_up.deal.tiles), (132, 6));
    assert_eq!(gate_up.deal.longer, 896 - 132 * 6);
    // Two columns of 16 features of seven pairs lie between the gates and the barriers.
    let task = gate_up.task;
    assert!(task.gates_at + 7 * 2 * 64 <= task.barriers_at);
    let keeps = |units, out_features| {
        planned(&sized(units, out_features), 1, false).task.flags & KEEP == KEEP
    };
    assert!(keeps(9, 128_256));
    assert!(!keeps(16, 4096), "two tiles");
    assert!(!keeps(8, 128_256));
    assert!(!keeps(17, 128_256));
}

/// A warp's class in the tile after one with `stages` stages, as `kernels/linear/ring.cuh` assigns classes.
fn next_class(class: usize, stages: usize) -> usize {
    match (stages % 2, class) {
        (0, _) => (class + 5) % 16,
        (_, ..8) => class + 8,
        _ => (class + 5) % 8,
    }
}

/// Most stages between two that a warp consumes, over tiles of these lengths. `stay`: consecutive tiles of one class.
fn longest_step(lengths: &[usize], stay: usize) -> usize {
    let mut longest = 0;
    for warp in 0..16 {
        let (mut class, mut first, mut last) = (warp, 0, None);
        for (tile, &stages) in lengths.iter().enumerate() {
            for stage in (class / 8..stages).step_by(2) {
                longest = longest.max(last.map_or(0, |last| first + stage - last));
                last = Some(first + stage);
            }
            first += stages;
            if (tile + 1) % stay == 0 {
                class = next_class(class, stages);
            }
        }
    }
    longest
}

#[test]
fn spare_slots_cover_the_longest_step_of_a_warp() {
    for stay in 1..=8 {
        assert!(longest_step(&[2; 64], stay) <= SPARE_SLOTS);
    }
    for stages in 1..=MOST_STAGES {
        let longest = longest_step(&vec![stages; 64], 1);
        assert!(longest == 2 || stages % 2 == 0 && longest == 3, "{stages}");
    }
    for a in 1..=MOST_STAGES {
        for b in [a, a + 1, a + 2] {
            for turn in 0..40usize {
                let mixed = |i: usize| if (i * i + turn * i) % 7 < 3 { a } else { b };
                let lengths: Vec<usize> = (0..64).map(mixed).collect();
                assert!(
                    longest_step(&lengths, 1) <= spare_slots([a, b].into_iter()),
                    "{a} {b}"
                );
            }
        }
    }
}

#[test]
fn units_are_divided_evenly_over_tiles() {
    // Units of the busiest warp: `down` of 8B; 5,120 features, where three tiles remain; 7,168.
    for (units, tiles, most) in [
        (56, 2, 7),
        (56, 16, 56),
        (20, 3, 5),
        (20, 16, 20),
        (28, 16, 28),
    ] {
        let mut classes: Vec<usize> = (0..16).collect();
        let mut done = [0; 16];
        for _ in 0..tiles {
            for (warp, class) in classes.iter_mut().enumerate() {
                done[warp] += (units - *class as i32 + 15) / 16;
                *class = next_class(*class, (units as usize).div_ceil(8));
            }
            let mut sorted = classes.clone();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..16), "every class has a warp");
        }
        assert_eq!(done.into_iter().max(), Some(most), "{units} {tiles}");
    }
}

#[test]
fn a_gate_needs_two_matrices_of_one_size() {
    let (a, mut b) = (matrix(16, 2064), matrix(16, 2064));
    assert_eq!(rows(&hopper(), &[&a, &b], GATED), 8);
    b.argument.out_features -= 16;
    assert_eq!(rows(&hopper(), &[&a, &b], GATED), 0);
    assert_eq!(rows(&hopper(), &[&a], GATED), 0);
}
