use super::*;
use crate::capabilities::tests::hopper;
use crate::ops::linear::tests::matrix;

const PLAIN: Matmul = Matmul {
    x: 4096,
    transposed: false,
    x_type: Half::F16,
    y: 8192,
    y_type: Half::F16,
    m: 64,
    apart: false,
    norm: None,
    input_activation: None,
    residual: 0,
    gate: None,
};
const NORM: Option<Norm> = Some(Norm {
    weight: 16,
    eps: 1e-5,
    offset: 0.0,
    bias: 0,
    layer: false,
});

fn head() -> Matrix {
    let mut head = matrix(16, 3088);
    head.argument.tiles = 8016;
    head.argument.out_features = 128_256;
    head
}

#[test]
fn memory_and_launch_rest_on_one_plan() {
    let (caps, head) = (hopper(), head());
    let of =
        |epilogue| Planned::new(&caps, &[&head], 64, epilogue, Tuning::default()).expect("fits");
    let logits = of(Epilogue::default());
    assert_eq!(logits.of(&PLAIN).shares.left, 24);
    assert_eq!(logits.exchange_bytes(), COUNTERS * 4 + 24 * 65536);
    let residual = Matmul {
        residual: 8192,
        ..PLAIN
    };
    let bf16 = Matmul {
        x_type: Half::BF16,
        ..PLAIN
    };
    let transposed = Matmul {
        x: 0,
        transposed: true,
        ..PLAIN
    };
    for op in [residual, bf16, transposed] {
        assert_eq!(logits.of(&op).shares.left, 0, "{op:?}");
    }
    for epilogue in [
        Epilogue {
            residual: true,
            ..Epilogue::default()
        },
        Epilogue {
            bf16: true,
            ..Epilogue::default()
        },
    ] {
        let found = of(epilogue);
        assert_eq!(found.of(&PLAIN).shares.left, 0, "{epilogue:?}");
        assert_eq!(found.exchange_bytes(), 0, "{epilogue:?}");
    }
}

#[test]
fn a_plan_is_of_its_matrices_and_rows() {
    let (made, mut other) = (matrix(16, 2064), matrix(16, 2064));
    other.argument.image += 128;
    let of = |matrices: &[&Matrix]| {
        let plan = Planned::new(
            &hopper(),
            matrices,
            64,
            Epilogue::default(),
            Tuning::default(),
        );
        plan.expect("fits").plan.task
    };
    let task = of(&[&made, &other]);
    assert!(task.is_of(&[&made, &other], 64));
    assert!(!task.is_of(&[&made, &other], 63));
    assert!(!task.is_of(&[&made], 64));
    assert!(!task.is_of(&[&other, &made], 64));
}

/// Callers ask once for all numbers of rows, and each launch is planned by its own.
#[test]
fn matrices_that_are_taken_have_a_launch_of_any_number_of_rows() {
    let mut mma = hopper();
    mma.code = 80;
    for mut caps in [hopper(), mma] {
        let (mut taken, mut refused) = (0, 0);
        for kib in 16..=caps.shared_per_block >> 10 {
            caps.shared_per_block = kib << 10;
            let made = matrix(64, 3088);
            if shares_launch(&caps, &[&made], PACKED_ROWS).is_err() {
                refused += 1;
                continue;
            }
            taken += 1;
            for m in 1..=PACKED_ROWS {
                let plan = plan(&caps, &[&made], m, false, Tuning::default());
                assert!(plan.is_ok(), "{m} rows in {kib} KiB");
            }
        }
        assert!(taken > 0 && refused > 0, "{taken} taken, {refused} refused");
    }
}

fn refusal(op: Matmul, next: Option<&Matrix>) -> String {
    let matrix = matrix(16, 2064);
    let next = next.map(|matrix| Next { matrix, scratch: 0 });
    check(&hopper(), &[&matrix], &op, false, next.as_ref())
        .map_or_else(|e| e.to_string(), |()| String::new())
}

#[test]
fn unsupported_calls_are_rejected_with_the_property() {
    let packed = Matmul { x: 0, ..PLAIN };
    let transposed = Matmul {
        transposed: true,
        ..PLAIN
    };
    for op in [
        PLAIN,
        packed,
        Matmul { x: 0, ..transposed },
        Matmul {
            norm: NORM,
            ..PLAIN
        },
        Matmul {
            residual: 8192,
            ..PLAIN
        },
    ] {
        assert_eq!(refusal(op, None), "", "{op:?}");
    }
    let named = [
        (transposed, "a transposed input"),
        (
            Matmul {
                gate: Some(0),
                ..PLAIN
            },
            "a gate",
        ),
        (
            Matmul {
                norm: NORM,
                input_activation: Some(1),
                ..PLAIN
            },
            "an activation of the input",
        ),
        (
            Matmul {
                norm: NORM,
                x: 4104,
                ..PLAIN
            },
            "a norm",
        ),
        (
            Matmul {
                norm: NORM,
                ..packed
            },
            "a packed input",
        ),
        (
            Matmul {
                x_type: Half::BF16,
                ..packed
            },
            "a packed input",
        ),
        (
            Matmul {
                residual: 2,
                ..PLAIN
            },
            "a residual",
        ),
        (
            Matmul {
                residual: 8192,
                y_type: Half::F32,
                ..PLAIN
            },
            "a residual",
        ),
    ];
    for (op, name) in named {
        let text = refusal(op, None);
        assert!(
            text.starts_with(&format!("{name} for the batch kernel: ")),
            "{text}"
        );
    }
    let next = matrix(16, 2064);
    assert!(refusal(PLAIN, Some(&next)).starts_with("a next matmul "));
}
