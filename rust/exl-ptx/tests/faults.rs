//! Kernels with planted faults: each must be found, and the correct version of the kernel must run.

mod common;

use common::one_block;
use exl_ptx::card::Card;
use exl_ptx::grid::run;
use exl_ptx::memory::Ranges;
use exl_ptx::module::Module;

/// A kernel of 64 threads: `body` between the declarations and the store of `%r9` of each thread to `out`.
fn kernel(body: &str) -> String {
    format!(
        ".version 9.0\n.target sm_80\n.address_size 64\n\
         .visible .entry test(.param .u64 out, .param .u32 number)\n{{\n\
         .reg .b32 %r<20>;\n.reg .b64 %rd<8>;\n.reg .pred %p<4>;\n.reg .f32 %f<4>;\n\
         .shared .align 16 .b8 held[512];\n\
         ld.param.u64 %rd1, [out];\nld.param.u32 %r1, [number];\nmov.u32 %r2, %tid.x;\n\
         mov.u32 %r3, held;\nshl.b32 %r4, %r2, 2;\nadd.s32 %r5, %r3, %r4;\n\
         cvt.u64.u32 %rd2, %r4;\nadd.s64 %rd3, %rd1, %rd2;\nmov.u32 %r9, 0;\n\
         {body}\n\
         st.global.u32 [%rd3], %r9;\nret;\n}}\n"
    )
}

fn outcome_of(text: &str, number: u32, seed: u64) -> Result<Vec<u32>, String> {
    let mut out = vec![0u32; 64];
    let mut ranges = Ranges::default();
    ranges.add(out.as_mut_ptr() as u64, 256);
    let module = Module::load(text, &mut ranges)?;
    let kernel = module.kernel("test")?;
    let mut params = (out.as_mut_ptr() as u64).to_le_bytes().to_vec();
    params.extend_from_slice(&number.to_le_bytes());
    let launch = one_block(64, params, seed);
    let card = Card::named("3090").expect("a known card");
    run(&kernel, &launch, &card, &ranges)?;
    Ok(out)
}

const HAND_OVER: &str =
    "xor.b32 %r6, %r5, 128;\nst.shared.u32 [%r5], %r2;\nBARRIER\nld.shared.u32 %r9, [%r6];";

#[test]
fn values_cross_a_barrier_in_every_order() {
    let text = kernel(&HAND_OVER.replace("BARRIER", "bar.sync 0;"));
    for seed in 0..20 {
        let out = outcome_of(&text, 0, seed).expect("a correct kernel");
        assert_eq!(out, (0..64).map(|t| t ^ 32).collect::<Vec<u32>>());
    }
}

#[test]
fn a_missing_barrier_is_found() {
    let text = kernel(&HAND_OVER.replace("BARRIER", ""));
    let found = (0..20).find_map(|seed| outcome_of(&text, 0, seed).err());
    let why = found.expect("some order reads before the store");
    assert!(
        why.contains("was never written") && why.contains("ld.shared.u32"),
        "{why}"
    );
}

#[test]
fn an_access_outside_of_an_allocation_is_found() {
    let text = kernel("st.global.u32 [%rd3+4], %r2;");
    let why = outcome_of(&text, 0, 0).expect_err("the last thread writes past the end");
    assert!(
        why.contains("no allocation contains") && why.contains("lane 31"),
        "{why}"
    );
    let why = outcome_of(&kernel("st.global.u32 [%rd3+1], %r2;"), 0, 0).expect_err("misaligned");
    assert!(why.contains("misaligned store of 4 bytes"), "{why}");
    let why =
        outcome_of(&kernel("st.shared.u32 [%r5+512], %r2;"), 0, 0).expect_err("past shared memory");
    assert!(why.contains("512 bytes of shared memory"), "{why}");
}

#[test]
fn a_deadlock_says_where_each_warp_waits() {
    // The second warp leaves for another barrier, and both wait for 64 threads.
    let text = kernel(
        "setp.lt.u32 %p1, %r2, 32;\n@%p1 bra A;\nbar.sync 1, 64;\nbra B;\nA:\nbar.sync 2, 64;\nB:",
    );
    let why = outcome_of(&text, 0, 0).expect_err("two barriers of half a block");
    assert!(
        why.contains("deadlock") && why.contains("barrier 1") && why.contains("barrier 2"),
        "{why}"
    );
    // A loop that waits for a value that nobody writes.
    let text = kernel(
        "st.shared.u32 [%r5], %r2;\nL:\nld.volatile.shared.u32 %r9, [%r5];\nsetp.ne.u32 %p1, %r9, 99;\n@%p1 bra L;",
    );
    let why = outcome_of(&text, 0, 0).expect_err("no progress");
    assert!(why.contains("nothing changes"), "{why}");
}

#[test]
fn lanes_that_miss_a_warps_exchange_are_found() {
    let text = kernel(
        "setp.lt.u32 %p1, %r2, 16;\n@!%p1 bra A;\nshfl.sync.bfly.b32 %r9, %r2, 1, 31, -1;\nbar.sync 0;\nbra B;\nA:\nbar.sync 0;\nB:",
    );
    let why = outcome_of(&text, 0, 0).expect_err("half a warp cannot exchange with all of it");
    assert!(why.contains("waits for lanes of its warp"), "{why}");
}

const COPY: &str = "cp.async.ca.shared.global [%r5], [%rd3], 4;\ncp.async.commit_group;\nWAIT\nld.shared.u32 %r9, [%r5];\n\
    add.s32 %r9, %r9, 7;\ncp.async.wait_all;";

#[test]
fn a_copy_is_waited_for() {
    for seed in 0..9 {
        let out = outcome_of(
            &kernel(&COPY.replace("WAIT", "cp.async.wait_group 0;")),
            0,
            seed,
        )
        .expect("it waits");
        assert_eq!(out, [7; 64]);
    }
    for wait in ["", "cp.async.wait_group 1;"] {
        let why = outcome_of(&kernel(&COPY.replace("WAIT", wait)), 0, 0)
            .expect_err("a copy that lands late");
        assert!(why.contains("has not been waited for"), "{why}");
    }
}

#[test]
fn unknown_instructions_are_named() {
    let why = outcome_of(&kernel("fns.b32 %r9, %r2, 0, 1;"), 0, 0)
        .expect_err("an instruction that nvcc does not emit here");
    assert!(why.contains("fns.b32") && why.contains("line"), "{why}");
}

#[test]
fn divergent_lanes_and_loops_give_what_each_thread_computes() {
    let text = kernel(
        "L:\nadd.s32 %r9, %r9, %r2;\nadd.s32 %r1, %r1, 1;\nsetp.le.u32 %p1, %r1, %r2;\n@%p1 bra L;",
    );
    for seed in 0..8 {
        let out = outcome_of(&text, 0, seed).expect("loops of different lengths");
        assert_eq!(out, (0..64).map(|t| t * t + t).collect::<Vec<u32>>());
    }
}
