//! Sorting of many u32.

const BITS: u32 = 11;
const BINS: usize = 1 << BITS;
/// Low bits that two passes may leave to the final insertion sort.
const LEFT: u32 = 6;
/// Moves per element above which a third pass is cheaper than the insertion sort.
const MOVES: usize = 4;

/// Sort the first `count` of `all`; `spare` is scratch memory.
pub fn sort(all: &mut Vec<u32>, spare: &mut Vec<u32>, count: usize) {
    if spare.len() < all.len() {
        spare.resize(all.len(), 0);
    }
    if !nearly(&mut all[..count], &mut spare[..count]) {
        completely(&mut all[..count], &mut spare[..count]);
        std::mem::swap(all, spare);
    }
}

/// Two passes and an insertion sort. Returns false, with the same keys in some order, if that takes too long.
fn nearly(keys: &mut [u32], spare: &mut [u32]) -> bool {
    let low = keys.iter().copied().min().unwrap_or(0);
    let range = keys.iter().copied().max().unwrap_or(0) - low;
    let shift = (u32::BITS - range.leading_zeros()).saturating_sub(2 * BITS);
    if shift > LEFT {
        return false;
    }
    let mut counts = [[0u32; BINS]; 2];
    for &key in &*keys {
        let digits = (key - low) >> shift;
        counts[0][digits as usize % BINS] += 1;
        counts[1][(digits >> BITS) as usize % BINS] += 1;
    }
    let [first, second] = &mut counts;
    pass(keys, spare, first, |key| (key - low) >> shift);
    pass(spare, keys, second, |key| (key - low) >> shift >> BITS);
    shift == 0 || insertion(keys)
}

/// Three passes over all bits, into `spare`.
fn completely(keys: &mut [u32], spare: &mut [u32]) {
    let counted = |keys: &[u32], shift: u32| {
        let mut counts = [0u32; BINS];
        for &key in keys {
            counts[(key >> shift) as usize % BINS] += 1;
        }
        counts
    };
    pass(keys, spare, &mut counted(keys, 0), |key| key);
    pass(spare, keys, &mut counted(spare, BITS), |key| key >> BITS);
    let last = 2 * BITS;
    pass(keys, spare, &mut counted(keys, last), |key| key >> last);
}

/// One stable pass by the digit that `digit` ends with.
#[inline(always)]
fn pass(from: &[u32], to: &mut [u32], counts: &mut [u32; BINS], digit: impl Fn(u32) -> u32) {
    let mut at = 0;
    for count in counts.iter_mut() {
        at += std::mem::replace(count, at);
    }
    for &key in from {
        let slot = &mut counts[digit(key) as usize % BINS];
        to[*slot as usize] = key;
        *slot += 1;
    }
}

/// Sort keys that are nearly sorted. Returns false, with the same keys in some order, if they are too far from sorted.
fn insertion(keys: &mut [u32]) -> bool {
    let mut left = MOVES * keys.len();
    for i in 1..keys.len() {
        let key = keys[i];
        if keys[i - 1] <= key {
            continue;
        }
        let mut at = i;
        while at > 0 && keys[at - 1] > key {
            keys[at] = keys[at - 1];
            at -= 1;
        }
        keys[at] = key;
        if i - at > left {
            return false;
        }
        left -= i - at;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sorts_any_keys() {
        let mut state = 1u32;
        let mut random = || {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state
        };
        let shapes: [fn(u32) -> u32; 7] = [
            |r| r,
            |r| r % 7,
            |r| r >> 8,
            |r| r >> 4,
            // All but one in a range that two passes do not distinguish.
            |r| if r % 4096 == 0 { r >> 4 } else { r % 64 },
            |r| (f64::from(r) / 4e9 * 9.0) as f32 as u32,
            |r| ((f64::from(r) / 4e9 * 9.0) as f32).to_bits(),
        ];
        for count in [0, 1, 2, 1000, 30_000] {
            for shape in shapes {
                let mut keys: Vec<u32> = (0..count).map(|_| shape(random())).collect();
                let mut want = keys.clone();
                want.sort_unstable();
                sort(&mut keys, &mut Vec::new(), count as usize);
                assert!(keys == want);
            }
        }
    }
}
