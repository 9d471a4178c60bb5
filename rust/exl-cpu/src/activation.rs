//! Activations of the MLP, elementwise over float32.

use crate::isa::Isa;
use crate::pool;
use crate::simd::{Kernel, Lanes, dispatch, exp, sigmoid, tanh};

const PER_TASK: usize = 1 << 13;

/// The activation functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// x * sigmoid(x)
    Silu,
    /// The tanh form of GELU: x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)).
    Gelu,
    /// x * sigmoid(1.702 x)
    QuickGelu,
    /// The exact form of GELU: x / 2 * (1 + erf(x / sqrt(2))).
    GeluErf,
    /// max(x, 0)^2
    Relu2,
    /// 1 / (1 + e^-x)
    Sigmoid,
    Tanh,
}

impl Activation {
    /// Parse the name that Python uses.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "silu" => Some(Self::Silu),
            "gelu" => Some(Self::Gelu),
            "quickgelu" => Some(Self::QuickGelu),
            "gelu_erf" => Some(Self::GeluErf),
            "relu2" => Some(Self::Relu2),
            "sigmoid" => Some(Self::Sigmoid),
            "tanh" => Some(Self::Tanh),
            _ => None,
        }
    }
}

/// One of the functions, as a type so that each gets a separate loop.
trait Function {
    fn of<V: Lanes>(x: V) -> V;
}

struct Silu;
struct Gelu;
struct QuickGelu;
struct GeluErf;
struct Relu2;
struct Sigmoid;
struct Tanh;

impl Function for Silu {
    #[inline(always)]
    fn of<V: Lanes>(x: V) -> V {
        x.mul(sigmoid(x))
    }
}

impl Function for Gelu {
    #[inline(always)]
    fn of<V: Lanes>(x: V) -> V {
        let cubic = x.mul(x).fma(V::splat(0.044_715), V::splat(1.0));
        x.mul(sigmoid(x.mul(cubic).mul(V::splat(1.595_769))))
    }
}

impl Function for QuickGelu {
    #[inline(always)]
    fn of<V: Lanes>(x: V) -> V {
        x.mul(sigmoid(x.mul(V::splat(1.702))))
    }
}

impl Function for GeluErf {
    /// max(x, 0) - |x| / 2 * erfc(|x| / sqrt(2)), with Abramowitz and Stegun 7.1.26 for erfc (error below 1.5e-7).
    #[inline(always)]
    fn of<V: Lanes>(x: V) -> V {
        // Beyond 100 the second term is zero. The bound avoids infinity times zero.
        let magnitude = V::splat(100.0).min(V::splat(0.0).sub(x).max(x));
        let z = magnitude.mul(V::splat(std::f32::consts::FRAC_1_SQRT_2));
        let t = V::splat(1.0).div(z.fma(V::splat(0.327_591_1), V::splat(1.0)));
        let mut p = V::splat(1.061_405_4);
        for c in [-1.453_152, 1.421_413_7, -0.284_496_74, 0.254_829_6] {
            p = p.fma(t, V::splat(c));
        }
        let erfc = p.mul(t).mul(exp(V::splat(0.0).sub(z.mul(z))));
        let half = magnitude.mul(V::splat(0.5));
        V::splat(0.0).max(x).sub(half.mul(erfc))
    }
}

impl Function for Relu2 {
    #[inline(always)]
    fn of<V: Lanes>(x: V) -> V {
        let positive = V::splat(0.0).max(x);
        positive.mul(positive)
    }
}

impl Function for Sigmoid {
    #[inline(always)]
    fn of<V: Lanes>(x: V) -> V {
        sigmoid(x)
    }
}

impl Function for Tanh {
    #[inline(always)]
    fn of<V: Lanes>(x: V) -> V {
        tanh(x)
    }
}

/// x = activation(x), or x = activation(x) * up if `up` is given (as long as `x`).
pub fn activate_in_place(kind: Activation, x: &mut [f32], up: Option<&[f32]>) {
    assert!(
        up.is_none_or(|up| up.len() == x.len()),
        "up must be as long as x"
    );
    let p = x.as_mut_ptr();
    // SAFETY: source and destination may be the same memory.
    unsafe { activate_raw(kind, p, up.map(<[f32]>::as_ptr), x.len(), p) }
}

/// x = activation(x) * up on the calling thread, for a pool task that processes its results.
pub(crate) fn activate_here(kind: Activation, x: &mut [f32], up: &[f32]) {
    assert_eq!(up.len(), x.len(), "up must be as long as x");
    let n = x.len();
    let out = x.as_mut_ptr();
    let kernel = Chunk {
        kind,
        x: out,
        up: Some(up.as_ptr()),
        out,
        n,
    };
    dispatch(Isa::current(), kernel);
}

/// out = activation(x) [* up].
/// # Safety
/// `len` floats at `x` and `up`, room for as many at `out`; `out` may be `x` or `up` but not overlap them otherwise.
pub unsafe fn activate_raw(
    kind: Activation,
    x: *const f32,
    up: Option<*const f32>,
    len: usize,
    out: *mut f32,
) {
    let (isa, x, up, out) = (
        Isa::current(),
        x as usize,
        up.map(|up| up as usize),
        out as usize,
    );
    // Up to two chunks stay on the calling thread.
    let per_task = if len <= 2 * PER_TASK {
        len.max(1)
    } else {
        PER_TASK
    };
    pool::run(len.div_ceil(per_task), &|task| {
        let first = task * per_task;
        let n = per_task.min(len - first);
        // SAFETY: `first + n <= len`.
        let kernel = unsafe {
            Chunk {
                kind,
                x: (x as *const f32).add(first),
                up: up.map(|up| (up as *const f32).add(first)),
                out: (out as *mut f32).add(first),
                n,
            }
        };
        dispatch(isa, kernel);
    });
}

struct Chunk {
    kind: Activation,
    x: *const f32,
    up: Option<*const f32>,
    out: *mut f32,
    n: usize,
}

impl Kernel for Chunk {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        match self.kind {
            Activation::Silu => self.map::<V, Silu>(),
            Activation::Gelu => self.map::<V, Gelu>(),
            Activation::QuickGelu => self.map::<V, QuickGelu>(),
            Activation::GeluErf => self.map::<V, GeluErf>(),
            Activation::Relu2 => self.map::<V, Relu2>(),
            Activation::Sigmoid => self.map::<V, Sigmoid>(),
            Activation::Tanh => self.map::<V, Tanh>(),
        }
    }
}

impl Chunk {
    #[inline(always)]
    fn map<V: Lanes, F: Function>(&self) {
        let n = self.n;
        let mut i = 0;
        // SAFETY: `activate_raw` made a chunk of n elements.
        unsafe {
            while i + V::LANES <= n {
                let mut y = F::of(V::load(self.x.add(i)));
                if let Some(up) = self.up {
                    y = y.mul(V::load(up.add(i)));
                }
                y.store(self.out.add(i));
                i += V::LANES;
            }
            if i < n {
                let mut y = F::of(V::load_partial(self.x.add(i), n - i));
                if let Some(up) = self.up {
                    y = y.mul(V::load_partial(up.add(i), n - i));
                }
                y.store_partial(self.out.add(i), n - i);
            }
        }
    }
}
