//! A CUDA driver for tests: it interprets PTX on the CPU and checks what a card does not.
//!
//! `driver` has the C functions of `libcuda.so.1`; `module` reads images; `parse` and `decode` make instructions of PTX; `grid` schedules
//! blocks and warps; `warp` executes instructions, and `asynchronous` copies that complete later.

// The functions of the tables of instructions are declared where they are chosen.
#![allow(
    clippy::unreadable_literal,
    clippy::cast_ptr_alignment,
    clippy::items_after_statements,
    clippy::enum_glob_use,
    clippy::wildcard_imports,
    clippy::implicit_hasher,
    clippy::match_same_arms,
    clippy::format_push_string,
    clippy::unused_self
)]

pub mod asynchronous;
pub mod card;
pub mod code;
pub mod decode;
pub mod driver;
pub mod float;
pub mod grid;
pub mod halves;
pub mod lanes;
pub mod memory;
pub mod module;
pub mod parse;
pub mod product;
pub mod registers;
pub mod warp;
