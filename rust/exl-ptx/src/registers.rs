//! Assignment of virtual registers to few slots, by the intervals in which they are live. Lanes have their own copies, so the flow of one
//! thread decides.

use crate::code::{Instruction, Kernel, Op, Value};
use crate::parse::Width;

fn register(value: &Value) -> Option<usize> {
    match *value {
        Value::Word(r) | Value::Double(r) | Value::Pred(r, _) => Some(r as usize),
        _ => None,
    }
}

fn reads(instruction: &Instruction) -> impl Iterator<Item = usize> {
    let guard = instruction.guard.map(|(r, _)| r as usize);
    instruction.from.iter().filter_map(register).chain(guard)
}

/// Basic blocks: first instruction, end, successors.
struct Block {
    first: usize,
    end: usize,
    next: Vec<usize>,
}

fn blocks(kernel: &Kernel) -> Vec<Block> {
    let count = kernel.code.len();
    let mut leads = vec![false; count + 1];
    leads[0] = true;
    for (at, instruction) in kernel.code.iter().enumerate() {
        match instruction.op {
            Op::Branch(target) => {
                leads[target as usize] = true;
                leads[at + 1] = true;
            }
            Op::BranchTable(table) => {
                for &target in &kernel.tables[table as usize] {
                    leads[target as usize] = true;
                }
                leads[at + 1] = true;
            }
            Op::Exit | Op::Trap => leads[at + 1] = true,
            _ => {}
        }
    }
    let firsts: Vec<usize> = (0..count).filter(|&at| leads[at]).collect();
    let block_of = |at: usize| firsts.partition_point(|&first| first <= at) - 1;
    let mut list = Vec::with_capacity(firsts.len());
    for (number, &first) in firsts.iter().enumerate() {
        let end = firsts.get(number + 1).copied().unwrap_or(count);
        let last = &kernel.code[end - 1];
        let mut next = Vec::new();
        let falls = match last.op {
            Op::Branch(target) => {
                next.push(block_of(target as usize));
                last.guard.is_some()
            }
            Op::BranchTable(table) => {
                next.extend(
                    kernel.tables[table as usize]
                        .iter()
                        .map(|&t| block_of(t as usize)),
                );
                last.guard.is_some()
            }
            Op::Exit | Op::Trap => last.guard.is_some(),
            _ => true,
        };
        if falls && end < count {
            next.push(number + 1);
        }
        list.push(Block { first, end, next });
    }
    list
}

/// Replace virtual registers by slots.
pub fn assign(kernel: &mut Kernel, widths: &[Width]) {
    let blocks = blocks(kernel);
    let row = widths.len().div_ceil(64);
    let mut live_in = vec![0u64; row * blocks.len()];
    let mut live_out = live_in.clone();
    // Backwards until nothing changes.
    let mut changed = true;
    while changed {
        changed = false;
        for (number, block) in blocks.iter().enumerate().rev() {
            let mut live = vec![0u64; row];
            for &next in &block.next {
                for (word, other) in live.iter_mut().zip(&live_in[next * row..(next + 1) * row]) {
                    *word |= other;
                }
            }
            live_out[number * row..(number + 1) * row].copy_from_slice(&live);
            for instruction in kernel.code[block.first..block.end].iter().rev() {
                if instruction.guard.is_none() {
                    for r in instruction.to.iter().filter_map(register) {
                        live[r / 64] &= !(1 << (r % 64));
                    }
                }
                for r in reads(instruction) {
                    live[r / 64] |= 1 << (r % 64);
                }
            }
            let known = &mut live_in[number * row..(number + 1) * row];
            if *known != *live {
                known.copy_from_slice(&live);
                changed = true;
            }
        }
    }
    let mut spans = vec![(usize::MAX, 0usize); widths.len()];
    let mut touch = |r: usize, at: usize| {
        spans[r] = (spans[r].0.min(at), spans[r].1.max(at));
    };
    for (number, block) in blocks.iter().enumerate() {
        for word in 0..row {
            let (mut coming, mut going) =
                (live_in[number * row + word], live_out[number * row + word]);
            while coming != 0 {
                touch(word * 64 + coming.trailing_zeros() as usize, block.first);
                coming &= coming - 1;
            }
            while going != 0 {
                // The end of a block's last instruction: a slot must not be reused by its results.
                touch(word * 64 + going.trailing_zeros() as usize, block.end);
                going &= going - 1;
            }
        }
        for at in block.first..block.end {
            let instruction = &kernel.code[at];
            instruction
                .to
                .iter()
                .filter_map(register)
                .for_each(|r| touch(r, at));
            reads(instruction).for_each(|r| touch(r, at));
        }
    }
    let slots = slots(&spans, widths, kernel);
    for instruction in &mut kernel.code {
        for value in instruction.to.iter_mut().chain(instruction.from.iter_mut()) {
            match value {
                Value::Word(r) | Value::Double(r) | Value::Pred(r, _) => *r = slots[*r as usize],
                _ => {}
            }
        }
        if let Some((r, _)) = &mut instruction.guard {
            *r = slots[*r as usize];
        }
    }
}

fn slots(spans: &[(usize, usize)], widths: &[Width], kernel: &mut Kernel) -> Vec<u32> {
    let mut slots = vec![0u32; spans.len()];
    for (width, count) in [
        (Width::Word, &mut kernel.words),
        (Width::Double, &mut kernel.doubles),
        (Width::Pred, &mut kernel.preds),
    ] {
        let mut order: Vec<usize> = (0..spans.len())
            .filter(|&r| widths[r] == width && spans[r].0 != usize::MAX)
            .collect();
        order.sort_by_key(|&r| spans[r]);
        let mut free: Vec<u32> = Vec::new();
        let mut ends: std::collections::BinaryHeap<std::cmp::Reverse<(usize, u32)>> =
            std::collections::BinaryHeap::new();
        for r in order {
            while let Some(&std::cmp::Reverse((end, slot))) = ends.peek() {
                if end >= spans[r].0 {
                    break;
                }
                ends.pop();
                free.push(slot);
            }
            let slot = free.pop().unwrap_or_else(|| {
                *count += 1;
                *count as u32 - 1
            });
            slots[r] = slot;
            ends.push(std::cmp::Reverse((spans[r].1, slot)));
        }
    }
    slots
}
