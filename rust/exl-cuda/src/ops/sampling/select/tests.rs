//! Tests of the table, as data, without a GPU.

use proptest::prelude::*;

use super::row::{Call, Late, Needs, Plan, Refusal, Way};
use super::*;
use crate::capabilities::CARDS;
use crate::capabilities::tests::hopper;
use crate::ops::sampling::{MOST_TOP, flag};

const SIZE: usize = 128_256;

/// A row of a large vocabulary with some settings.
fn call(change: fn(&mut Call)) -> Call {
    let mut made = Call {
        size: SIZE,
        ..Call::default()
    };
    change(&mut made);
    made
}

/// Kernels that sample rows of one call.
fn kernels(plan: &Plan) -> Vec<Kernel> {
    let batch = Batch {
        rows: 1,
        pitch: SIZE,
        needs: plan.needs,
        copies: false,
    };
    let launches = super::plan(&hopper(), &batch);
    launches.iter().map(|planned| planned.kernel).collect()
}

#[test]
fn the_table_of_settings() {
    use Kernel::{Choose, Mix, MixMaxima, MixSums, Shape, Sums, Wide};
    type Change = fn(&mut Call);
    let table: [(Change, Way, &[Kernel], &[Refusal]); 10] = [
        (|c| c.greedy = true, Way::Largest, &[Shape, Choose], &[]),
        (|_| (), Way::All, &[Shape, Sums, Choose], &[Refusal::Sums]),
        (
            |c| c.top_n = 1,
            Way::All,
            &[Shape, Sums, Choose, Wide],
            &[Refusal::Sums, Refusal::Overflow],
        ),
        (
            |c| (c.top_k, c.top_p) = (50, true),
            Way::Table,
            &[Shape, Choose, Wide],
            &[Refusal::Overflow],
        ),
        (
            |c| c.min_p = true,
            Way::Table,
            &[Shape, Sums, Choose, Wide],
            &[Refusal::Sums, Refusal::Overflow],
        ),
        (
            |c| c.top_k = CAPACITY + 1,
            Way::Passes,
            &[Shape, Choose, Wide],
            &[Refusal::TopK],
        ),
        (
            |c| (c.top_k, c.typical) = (50, true),
            Way::Passes,
            &[Shape, Choose, Wide],
            &[Refusal::Typical],
        ),
        (
            |c| (c.mirostat, c.tfs) = (true, true),
            Way::Passes,
            &[Shape, Choose, Wide],
            &[Refusal::Unlimited],
        ),
        (
            |c| (c.mixed, c.greedy) = (true, true),
            Way::Largest,
            &[MixMaxima, MixSums, Mix, Shape, Choose],
            &[Refusal::Mixed],
        ),
        (
            |c| c.top_n = MOST_TOP + 1,
            Way::Host,
            &[Shape, Choose],
            &[Refusal::TopN],
        ),
    ];
    for (change, way, expected, reasons) in table {
        let made = call(change);
        let found = row::plan(&made);
        let refused: Vec<_> = found.refused().iter().map(|&(_, why)| why).collect();
        assert_eq!((found.way, refused.as_slice()), (way, reasons), "{made:?}");
        assert_eq!(kernels(&found), expected, "{made:?}");
    }
}

#[test]
fn a_top_k_of_all_logits_is_none() {
    for top_k in [0, SIZE, SIZE + 1] {
        let mut made = call(|_| ());
        made.top_k = top_k;
        assert_eq!(row::plan(&made), row::plan(&call(|_| ())));
    }
}

fn calls() -> impl Strategy<Value = Call> {
    let sizes = prop_oneof![Just(0), 1..40usize, Just(SIZE)];
    let top_k = prop_oneof![Just(0), 1..50usize, CAPACITY - 1..CAPACITY + 2, Just(SIZE)];
    let late = prop_oneof![Just(Late::None), Just(Late::Fixed), Just(Late::Dynamic)];
    let top_n = prop_oneof![Just(0), 1..MOST_TOP + 2];
    (sizes, top_k, late, top_n, any::<[bool; 11]>()).prop_map(|(size, top_k, late, top_n, on)| {
        let [
            greedy,
            smooth,
            descending,
            top_p,
            top_a,
            min_p,
            tfs,
            typical,
            mirostat,
            xtc,
            mixed,
        ] = on;
        Call {
            size,
            greedy,
            smooth,
            top_k,
            top_p,
            top_a,
            min_p,
            tfs,
            typical,
            mirostat,
            late,
            xtc,
            descending,
            mixed,
            top_n,
        }
    })
}

proptest! {
    #[test]
    fn a_plan_of_a_row_has_what_its_kernels_read(call in calls()) {
        let plan = row::plan(&call);
        let has = |bit: i32| plan.flags & bit != 0;
        prop_assert_eq!(has(flag::SUMS), plan.needs.sums);
        prop_assert!(!(has(flag::SUMS) && has(flag::WIDE)), "passes make sums of their own");
        prop_assert!(!has(flag::WIDE) || plan.needs.wide);
        prop_assert!(!has(flag::GREEDY) || !plan.needs.wide && !plan.needs.sums);
        prop_assert!(!has(flag::SKIP) || plan.needs == Needs::default());
        prop_assert_eq!(has(flag::SKIP), plan.way == Way::Host);
        prop_assert!(plan.top_k < call.size.max(1));
        // Every launch besides shaping and choosing has a reason, and every reason a launch.
        let more = [plan.needs.sums, plan.needs.wide, plan.needs.mix, has(flag::SKIP)];
        let expected = more.into_iter().filter(|&more| more).count();
        prop_assert_eq!(plan.refused().len(), expected);
    }

    #[test]
    fn launches_of_a_batch_serve_all_rows_and_fit_the_card(
        calls in proptest::collection::vec(calls(), 1..6),
        card in proptest::sample::select(CARDS.to_vec()),
        pitch in (1usize..300).prop_map(|segments| segments * SEGMENT),
        copies: bool,
    ) {
        let caps = card.with_own_code();
        let plans: Vec<_> = calls.iter().map(row::plan).collect();
        let needs = plans.iter().fold(Needs::default(), |needs, plan| needs.or(plan.needs));
        let rows = calls.len();
        let launches = super::plan(&caps, &Batch { rows, pitch, needs, copies });
        let found: Vec<_> = launches.iter().map(|planned| planned.kernel).collect();
        prop_assert!(found.is_sorted(), "the order of launches");
        for plan in &plans {
            prop_assert!(kernels(plan).iter().all(|kernel| found.contains(kernel)));
        }
        for planned in &launches {
            prop_assert!(planned.shared as usize <= caps.shared_per_block);
            let [x, y, _] = planned.grid.map(|n| n as usize);
            match planned.kernel {
                Kernel::Choose => prop_assert_eq!(x, rows),
                Kernel::Wide => prop_assert!(x <= 2 * caps.sms, "all blocks are resident"),
                kernel => {
                    prop_assert_eq!(x * SEGMENT, pitch);
                    prop_assert_eq!(y, rows + usize::from(kernel == Kernel::Shape && copies));
                }
            }
        }
    }
}

#[test]
fn a_batch_without_rows_launches_nothing() {
    let batch = Batch {
        rows: 0,
        pitch: SEGMENT,
        needs: Needs::default(),
        copies: true,
    };
    assert!(super::plan(&hopper(), &batch).is_empty());
}
