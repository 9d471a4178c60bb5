use super::super::takes;
use super::*;
use crate::capabilities::tests::{RELEASE, card, hopper};
use crate::ops::linear::tests::matrix;

#[test]
fn parts_hold_every_unit_once() {
    for units in [1, 5, 9, 16, 17, 56, 255] {
        for (cut, stage_log) in [(1, 3), (2, 1), (4, 1)] {
            let shape = Shape { cut, stage_log };
            let own = shape.stages(units) << stage_log;
            let mut all: Vec<usize> = (0..cut)
                .flat_map(|rank| (0..own).map(move |local| shape.unit(rank, local)))
                .filter(|&u| u < units)
                .collect();
            all.sort_unstable();
            assert!(all.into_iter().eq(0..units), "{units} {cut}");
        }
    }
}

#[test]
fn parameters_list_all_units_or_none() {
    let (small, large) = (matrix(16, 2064), matrix(56, 2064));
    for (matrices, known) in [
        (vec![&small, &small, &small], true),
        (vec![&large], true),
        (vec![&large, &small], true),
        (vec![&matrix(79, 2064)], true),
        (vec![&matrix(80, 2064)], false),
        (vec![&large, &small, &small], false),
        (vec![&matrix(16, 2060)], false),
    ] {
        let (list, begin) = listed(&matrices);
        for (a, &begin) in matrices.iter().zip(&begin) {
            assert_eq!(begin >= 0, known);
            for (u, &offset) in a.unit_offsets.iter().enumerate().filter(|_| known) {
                let unit = list[begin as usize + u];
                assert_eq!((unit & 0xffff) * 16, offset);
                assert_eq!(unit >> 16, a.unit_widths[u]);
            }
        }
    }
}

/// Most stages between two that a warp consumes, by enumeration.
fn longest_step(shape: Shape, stages: usize) -> usize {
    let classes = CLASSES / shape.cut;
    let (mut longest, rounds) = (0, 40);
    for warp in 0..CLASSES {
        let (mut at, mut last) = (warp, None);
        for round in 0..rounds {
            let own = stages << shape.stage_log;
            for unit in (at % classes..own).step_by(classes) {
                let stage = round * stages + (unit >> shape.stage_log);
                longest = longest.max(last.map_or(0, |last| stage - last));
                last = Some(stage);
            }
            at = (at + NEXT) % CLASSES;
        }
    }
    longest
}

#[test]
fn spare_slots_cover_the_longest_step_of_a_warp() {
    for (cut, stage_log) in [(1, 3), (2, 1), (4, 1)] {
        let shape = Shape { cut, stage_log };
        for stages in 1..40 {
            assert!(
                longest_step(shape, stages) <= shape.spare_slots(stages),
                "{shape:?} {stages}"
            );
        }
    }
}

#[test]
fn a_plan_fits_the_shared_memory() {
    for (units, bytes) in [
        (1, 1040),
        (16, 4112),
        (16, 2064),
        (56, 2064),
        (56, 4112),
        (255, 4160),
    ] {
        let made = matrix(units, bytes);
        for (together, gated) in [
            (vec![&made], false),
            (vec![&made, &made, &made], false),
            (vec![&made, &made], true),
        ] {
            for cut in [0, 1, 2, 4] {
                let tuning = Tuning {
                    cut,
                    ..Tuning::default()
                };
                let Ok(plan) = plan(&hopper(), &together, 8, gated, tuning) else {
                    continue;
                };
                let task = plan.task;
                assert!((LEAST_SHARED..=232_448).contains(&plan.shared));
                assert!(plan.groups * task.cut as usize <= 132 && task.window >= 1);
                assert_eq!(task.copies, 1);
                let dealt = task.rounds as usize * plan.groups + task.longer as usize;
                let pair = if gated && task.cut == 1 {
                    2
                } else {
                    task.cut as usize
                };
                assert_eq!(dealt, (256 * together.len()).div_ceil(pair));
                assert!(task.slots > task.window);
            }
        }
    }
    assert_eq!(takes(&hopper(), &[&matrix(16, 2064)], false), Ok(()));
    let down = plan(&hopper(), &[&matrix(56, 2064)], 8, false, Tuning::default());
    assert_eq!(down.map(|p| (p.task.cut, p.task.window)), Ok((2, 4)));
    let ampere = card("3090", RELEASE);
    assert!(takes(&ampere, &[&matrix(16, 2064)], false).is_err());
}
