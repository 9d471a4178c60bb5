//! The table that picks the kernel that rotates and stores by tokens, types, heads and alignment.
//!
//! All kernels give bitwise identical results, and no choice depends on the card. Launches and reports use the same function, [`select`].

use super::{Codec, Kind};
use crate::ops::Element;

/// Kernels of [`super::rope_store`], with bitwise identical results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// A block for four heads of a token.
    Heads(Element),
    /// A block a token: halves into pages of halves, with heads rotated whole.
    Many,
}

impl Kernel {
    pub(super) fn all() -> impl Iterator<Item = Self> {
        Element::ALL
            .into_iter()
            .map(Self::Heads)
            .chain([Self::Many])
    }

    pub fn name(self) -> String {
        match self {
            Self::Heads(element) => format!("rope_store_{}", element.suffix()),
            Self::Many => "rope_store_many".to_owned(),
        }
    }
}

/// Fewest tokens for which [`Kernel::Many`] has enough blocks.
const MANY_TOKENS: usize = 64;

/// The properties of a call that decide its kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    pub tokens: usize,
    pub element: Element,
    /// Format of the pages.
    pub kind: Kind,
    pub head_dim: usize,
    pub rotated: usize,
    pub interleaved: bool,
    /// All operands, their tokens and the pages are aligned to 16 bytes.
    pub aligned: bool,
}

/// The kernel of a call on any card, and what the faster one takes where it does not take the call.
pub fn select(call: &Call) -> (Kernel, Option<&'static str>) {
    let heads = Kernel::Heads(call.element);
    if call.tokens < MANY_TOKENS {
        return (heads, None);
    }
    let halves = (call.kind.key, call.kind.value) == (Codec::F16, Codec::F16);
    let refused = [
        (call.element == Element::F16, "float16 operands"),
        (halves, "float16 pages"),
        (
            call.rotated == call.head_dim && !call.interleaved,
            "heads of which all elements are rotated, halves together",
        ),
        (
            call.head_dim.is_multiple_of(16),
            "heads of multiples of 16 elements",
        ),
        (call.aligned, "operands aligned to 16 bytes"),
    ]
    .into_iter()
    .find(|(fits, _)| !fits);
    match refused {
        Some((_, what)) => (heads, Some(what)),
        None => (Kernel::Many, None),
    }
}

#[cfg(test)]
mod tests {
    use super::super::KINDS;
    use super::*;

    #[test]
    fn many_tokens_of_halves_have_a_block_each() {
        let prompt = Call {
            tokens: 64,
            element: Element::F16,
            kind: KINDS[0],
            head_dim: 128,
            rotated: 128,
            interleaved: false,
            aligned: true,
        };
        assert_eq!(select(&prompt), (Kernel::Many, None));
        let few = Call {
            tokens: 63,
            ..prompt
        };
        assert_eq!(select(&few), (Kernel::Heads(Element::F16), None));
        for (call, what) in [
            (
                Call {
                    element: Element::BF16,
                    ..prompt
                },
                "float16 operands",
            ),
            (
                Call {
                    kind: KINDS[1],
                    ..prompt
                },
                "float16 pages",
            ),
            (
                Call {
                    rotated: 64,
                    ..prompt
                },
                "all elements are rotated",
            ),
            (
                Call {
                    interleaved: true,
                    ..prompt
                },
                "all elements are rotated",
            ),
            (
                Call {
                    head_dim: 72,
                    rotated: 72,
                    ..prompt
                },
                "multiples of 16 elements",
            ),
            (
                Call {
                    aligned: false,
                    ..prompt
                },
                "aligned to 16 bytes",
            ),
        ] {
            let (kernel, why) = select(&call);
            assert_eq!(kernel, Kernel::Heads(call.element));
            assert!(why.is_some_and(|why| why.contains(what)), "{why:?}");
        }
        assert_eq!(Kernel::all().count(), 4);
    }
}
