//! The checks of the fuzz targets on random input, for seconds and on a stable compiler: see `fuzz/`.

#[path = "../fuzz/checks/mod.rs"]
mod checks;

use arbitrary::{Arbitrary, Unstructured};
use exl_format::exl2::{Exl2Matrix, Exl2View};
use proptest::prelude::*;

const SEEDS: [&[u8]; 4] = [
    include_bytes!("../fuzz/seeds/safetensors/two_tensors"),
    include_bytes!("../fuzz/seeds/safetensors/metadata"),
    include_bytes!("../fuzz/seeds/safetensors/overlap"),
    include_bytes!("../fuzz/seeds/safetensors/long_header"),
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn safetensors_files_are_rejected_or_readable(
        seed in prop::sample::select(&SEEDS[..]),
        edits in prop::collection::vec((any::<prop::sample::Index>(), prop_oneof!["[0-9,{}\"\\[\\]]", "\\PC"]), 0..4),
        data: u8,
    ) {
        let mut input = seed.to_vec();
        for (at, text) in edits {
            let at = at.index(input.len());
            input.splice(at..=at, text.bytes());
        }
        checks::safetensors(&input);
        input[0] = data;
        checks::safetensors(&input);
    }

    #[test]
    fn exl2_matrices_are_rejected_or_readable(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let case = checks::Exl2Case::arbitrary(&mut Unstructured::new(&bytes));
        case.expect("any bytes make a case").check();
    }

    #[test]
    fn gptq_matrices_are_rejected_or_readable(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let case = checks::GptqCase::arbitrary(&mut Unstructured::new(&bytes));
        case.expect("any bytes make a case").check();
    }
}

#[test]
fn a_shape_that_no_memory_holds_is_rejected() {
    let matrix = Exl2Matrix::empty(&[(4, 32)], 8, None).expect("a small matrix");
    let mut tensors = matrix.tensors();
    tensors.q_scale = &[];
    tensors.q_scale_shape = [usize::MAX, 0];
    let error = Exl2View::new("m", tensors).expect_err("the shape has no place for scales");
    assert!(error.to_string().contains("q_scale"), "{error}");
}
