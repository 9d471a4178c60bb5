//! Which matmuls pack the input of the next one, and what they take into their launch.

use super::*;

#[test]
fn matmuls_without_bulk_copies_chain_for_any_number_of_rows() {
    for name in ["2080 Ti", "3060", "3090", "4090", "A100", "L4", "L40S"] {
        let caps = card(name, RELEASE);
        for rows in 1..=8 {
            let of = |matmul| planned(&caps, matmul, rows);
            let (qkv, o, gate_up, down) = (of("qkv"), of("o"), of("gate_up"), of("down"));
            assert!(o.chains_to(&gate_up), "{name} {rows}");
            assert!(gate_up.chains_to(&down), "{name} {rows}");
            assert!(down.chains_to(&qkv), "{name} {rows}");
        }
    }
}

/// The plan of the matmul of this name in [`layer`].
fn planned(caps: &Capabilities, name: &str, rows: usize) -> Plan {
    let found = layer().into_iter().find(|(known, ..)| *known == name);
    let (_, matrices, epilogue) = found.expect("a matmul of the layer");
    let all: Vec<&Matrix> = matrices.iter().collect();
    plan(caps, &all, Call::aligned(rows, epilogue))
}

#[test]
fn matmuls_chain_if_one_kernel_packs_the_input_of_the_other() {
    for name in CARDS.map(|card| card.name) {
        let caps = card(name, RELEASE);
        for rows in [1, 2, 3, 8, 9, 32, 64, 65, 128, 129, 512] {
            let of = |matmul| planned(&caps, matmul, rows);
            let (qkv, o, gate_up, down) = (of("qkv"), of("o"), of("gate_up"), of("down"));
            let both = |a: &Plan, b: &Plan, kernel| {
                [a, b]
                    .iter()
                    .all(|plan| plan.joined && plan.kernel == kernel)
            };
            let few = rows > GEMV_ROWS;
            let expected = (few && both(&o, &gate_up, Kernel::GemmFew))
                || both(&o, &gate_up, Kernel::GemmDirect);
            assert_eq!(o.chains_to(&gate_up), expected, "{name} {rows}");
            let expected = (few && both(&gate_up, &down, Kernel::GemmFew))
                || both(&gate_up, &down, Kernel::GemmDirect)
                || both(&gate_up, &down, Kernel::GemmBatch);
            assert_eq!(gate_up.chains_to(&down), expected, "{name} {rows}");
            assert!(!qkv.chains_to(&o), "several matrices without a gate");
            let columns = o.input_columns;
            let packs = match o.kernel {
                Kernel::GemmFew => few,
                kernel => [Kernel::GemmDirect, Kernel::GemmBatch].contains(&kernel),
            };
            assert_eq!(columns.is_some(), o.joined && packs, "{name} {rows}");
            assert!(columns.is_none_or(|columns| (o.call.rows..=BLOCK_ROWS).contains(&columns)));
        }
    }
}

#[test]
fn bf16_rows_and_unaligned_inputs_do_not_chain() {
    let (hopper, made) = (card("H100", &["90a"]), sized(16, 2064, 4096));
    for rows in [4, 32] {
        let aligned = Call::aligned(rows, PLAIN);
        let bf16 = Epilogue {
            bf16: true,
            ..PLAIN
        };
        for call in [
            Call {
                aligned_input: false,
                ..aligned
            },
            Call::aligned(rows, bf16),
        ] {
            let plan = plan(&hopper, &[&made], call);
            assert!(!plan.takes_packed && !plan.packs_results && plan.input_columns.is_none());
        }
        assert!(plan(&hopper, &[&made], aligned).input_columns.is_some());
    }
}

#[test]
fn an_activation_is_an_epilogue_of_up_to_eight_rows() {
    let hopper = card("H100", &["90a"]);
    let up = matrix(16, 2064);
    let activated = Epilogue {
        activation: true,
        ..PLAIN
    };
    for (rows, kernel, separate, packs) in [
        (1, Kernel::GemvRing, false, false),
        (8, Kernel::GemmFew, false, true),
        (32, Kernel::GemmBatch, true, false),
    ] {
        let found = plan(&hopper, &[&up], Call::aligned(rows, activated));
        assert_eq!((found.kernel, found.joined), (kernel, true));
        assert_eq!(
            (found.separate_activation, found.packs_results),
            (separate, packs)
        );
        assert_eq!(found.activates_input, kernel == Kernel::GemmBatch);
    }
}

#[test]
fn a_layer_norm_is_a_prologue_of_the_ring_alone() {
    let (one, caps) = (matrix(16, 2064), card("H100", RELEASE));
    let layer = Epilogue {
        layer: true,
        ..NORM
    };
    let found = |rows, epilogue| {
        let found = plan(&caps, &[&one], Call::aligned(rows, epilogue));
        found.joined.then_some(found.kernel)
    };
    assert_eq!(
        [1, 2].map(|rows| found(rows, layer)),
        [Some(Kernel::GemvRing); 2]
    );
    assert_eq!([3, 9, 65].map(|rows| found(rows, layer)), [None; 3]);
    assert_eq!(
        [1, 3, 9].map(|rows| found(rows, NORM)),
        [
            Some(Kernel::GemvRing),
            Some(Kernel::GemmFew),
            Some(Kernel::GemmBatch)
        ]
    );
    let older = card("3090", RELEASE);
    let call = Call::aligned(1, layer);
    assert!(!plan(&older, &[&one], call).joined);
    assert!(plan(&older, &[&one], Call::aligned(1, NORM)).joined);
}

/// Clusters that share K in quarters, and a ring of few wide units with long inputs, leave memory idle: 70B models with three to eight sequences.
#[test]
fn long_inputs_of_few_rows_are_multiplied_directly() {
    let caps = card("H200", RELEASE);
    let (four, six) = (2064, 3088);
    let of =
        |matrices: &[&Matrix], epilogue, rows| plan(&caps, matrices, Call::aligned(rows, epilogue));
    for (units, n, bytes, expected) in [
        (32, 8192, four, Kernel::GemmFew),
        (56, 4096, four, Kernel::GemmFew),
        (128, 5120, four, Kernel::GemmFew),
        (80, 7168, four, Kernel::GemmDirect),
        (112, 8192, four, Kernel::GemmDirect),
        (32, 128_256, six, Kernel::GemmDirect),
        (16, 128_256, six, Kernel::GemmFew),
        (18, 256_000, six, Kernel::GemmFew),
        (20, 5120, 4112, Kernel::GemmFew),
    ] {
        let matrix = sized(units, bytes, n);
        for rows in [3, 8] {
            let found = of(&[&matrix], RESIDUAL, rows);
            assert_eq!(
                (found.kernel, found.joined),
                (expected, true),
                "{units} {n} {rows}"
            );
        }
        assert_ne!(
            of(&[&matrix], RESIDUAL, 2).kernel,
            Kernel::GemmDirect,
            "{units}"
        );
    }
    // Both kernels pack results for each other.
    let (up, down) = (sized(32, four, 28672), sized(112, four, 8192));
    let qkv = [
        sized(32, four, 8192),
        sized(32, four, 1024),
        sized(32, four, 1024),
    ];
    let gate_up = of(&[&up, &up], GATE, 8);
    let down = of(&[&down], RESIDUAL, 8);
    let qkv = of(&[&qkv[0], &qkv[1], &qkv[2]], NORM, 8);
    assert_eq!(
        [&gate_up, &down, &qkv].map(|plan| plan.kernel),
        [Kernel::GemmFew, Kernel::GemmDirect, Kernel::GemmFew]
    );
    assert!(gate_up.chains_to(&down) && down.chains_to(&qkv));
    assert_ne!(
        plan_alone(
            &caps,
            &sized(32, six, 128_256),
            Call::aligned(8, Epilogue::default())
        )
        .kernel,
        Kernel::GemmFew
    );
}
