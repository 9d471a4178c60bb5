use super::super::takes;
use super::*;
use crate::capabilities::tests::{RELEASE, card, hopper};
use crate::ops::linear::tests::{matrix, sized};

#[test]
fn parts_hold_every_unit_once() {
    for units in [1, 5, 9, 16, 17, 56, 255] {
        for shape in Shape::ALL {
            let own = shape.stages(units) << shape.stage_log;
            let mut all: Vec<usize> = (0..shape.cut)
                .flat_map(|rank| (0..own).map(move |local| shape.unit(rank, local)))
                .filter(|&u| u < units)
                .collect();
            all.sort_unstable();
            assert!(all.into_iter().eq(0..units), "{units} {shape:?}");
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
                assert_eq!((unit & 0x7fff) * 16, offset);
                assert_eq!(unit >> 15, a.unit_widths[u]);
            }
        }
    }
}

/// Most stages between two that a warp consumes, by enumeration. `rounds`: iterations of a pass.
fn longest_step(shape: Shape, stages: usize, class_step: usize, rounds: usize) -> usize {
    let classes = CLASSES / shape.cut;
    let first = shape.first_stages(stages);
    let mut longest = 0;
    for warp in 0..CLASSES {
        let (mut before, mut last) = (0, None);
        for of_pass in [first, stages - first] {
            let mut at = warp;
            for _ in 0..rounds {
                for unit in (at % classes..of_pass << shape.stage_log).step_by(classes) {
                    let stage = before + (unit >> shape.stage_log);
                    longest = longest.max(last.map_or(0, |last| stage - last));
                    last = Some(stage);
                }
                before += of_pass;
                at = (at + class_step) % CLASSES;
            }
        }
    }
    longest
}

#[test]
fn spare_slots_cover_the_longest_step_of_a_warp() {
    for shape in Shape::ALL {
        for stages in 1..40 {
            for class_step in CLASS_STEPS {
                let spare = shape.spare_slots(stages, class_step);
                let rounds = if shape.passes > 1 {
                    1..=FINISHERS
                } else {
                    40..=40
                };
                for rounds in rounds {
                    assert!(
                        longest_step(shape, stages, class_step, rounds) <= spare,
                        "{shape:?} {stages} {class_step} {rounds}"
                    );
                }
            }
        }
    }
}

/// A matrix of `k` inputs as files have them: the first eighth of its groups of 128 has five bits, the rest four.
fn mixed(k: usize, n: usize) -> Matrix {
    let (units, groups) = (k.div_ceil(256), k.div_ceil(128));
    let mut made = sized(units, 2064, n);
    let bits = |group: usize| match group {
        g if g >= groups => 0,
        g if g < (groups / 8).max(1) => 5,
        _ => 4,
    };
    for u in 0..units {
        let [low, high] = [bits(2 * u), bits(2 * u + 1)];
        made.unit_widths[u] = (low * 0x11) | (high * 0x1100);
        made.unit_offsets[u + 1] = made.unit_offsets[u] + 256 * (low + high) + 16;
    }
    made.unit_widths[units] = 0;
    made.argument.tile_bytes = made.unit_offsets[units];
    made
}

#[test]
fn weights_of_common_sizes_stay_in_flight() {
    // Inputs, outputs, gated: parts of K, units of a stage, passes.
    for (k, n, gated, shape) in [
        (4096, 6144, false, (1, 8, 1)),
        (4096, 14336, true, (1, 8, 1)),
        (3072, 9216, false, (1, 8, 1)),
        (3584, 18944, true, (1, 8, 1)),
        (4608, 18432, false, (1, 4, 1)),
        (5120, 5120, false, (1, 8, 1)),
        (8192, 3072, false, (1, 4, 1)),
        (11008, 4096, false, (2, 2, 1)),
        (12800, 4096, false, (2, 2, 1)),
        (14336, 4096, false, (2, 2, 1)),
        (15360, 3840, false, (2, 2, 1)),
        (16384, 4096, false, (2, 2, 1)),
        (18432, 4608, false, (2, 2, 2)),
        (18944, 3584, false, (2, 2, 2)),
    ] {
        let made = mixed(k, n);
        let all = vec![&made; if gated { 2 } else { 1 }];
        let found = plan(&hopper(), &all, 8, (gated, false), Tuning::default()).expect("fits");
        let task = found.task;
        let passes = 1 + usize::from(task.first_stages < task.stages);
        assert_eq!(
            (task.cut, 1 << task.stage_log, passes),
            shape,
            "{k} {task:?}"
        );
        assert!(found.in_flight(&all) >= LEAST_IN_FLIGHT, "{k} {task:?}");
        let stay = if (k / 128 / 8) % 2 == 1 {
            STAY_MIXED
        } else {
            STAY
        };
        assert_eq!(task.stay, stay, "{k}");
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
            for (cut, passes) in [(0, 0), (1, 0), (2, 1), (2, 2), (4, 0)] {
                let tuning = Tuning {
                    cut,
                    passes,
                    ..Tuning::default()
                };
                let Ok(plan) = plan(&hopper(), &together, 8, (gated, false), tuning) else {
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
    let down = plan(
        &hopper(),
        &[&matrix(56, 2064)],
        8,
        (false, false),
        Tuning::default(),
    );
    assert_eq!(down.map(|p| (p.task.cut, p.task.window)), Ok((2, 4)));
    let ampere = card("3090", RELEASE);
    assert!(takes(&ampere, &[&matrix(16, 2064)], false).is_err());
}
