//! Macros that make a function of 32 lanes from an expression of one lane. Type names are resolved where a macro is used.

macro_rules! w1 {
    ($a:ident => $e:expr) => {{
        fn apply(x: &Words) -> Words {
            let mut o = [0; 32];
            for i in 0..32 {
                let $a = x[i];
                o[i] = $e;
            }
            o
        }
        Lanes::W1(apply)
    }};
}
macro_rules! w1d {
    ($a:ident => $e:expr) => {{
        fn apply(x: &Doubles) -> Words {
            let mut o = [0; 32];
            for i in 0..32 {
                let $a = x[i];
                o[i] = $e;
            }
            o
        }
        Lanes::W1d(apply)
    }};
}
macro_rules! d1w {
    ($a:ident => $e:expr) => {{
        fn apply(x: &Words) -> Doubles {
            let mut o = [0; 32];
            for i in 0..32 {
                let $a = x[i];
                o[i] = $e;
            }
            o
        }
        Lanes::D1w(apply)
    }};
}
macro_rules! d1 {
    ($a:ident => $e:expr) => {{
        fn apply(x: &Doubles) -> Doubles {
            let mut o = [0; 32];
            for i in 0..32 {
                let $a = x[i];
                o[i] = $e;
            }
            o
        }
        Lanes::D1(apply)
    }};
}
macro_rules! two {
    ($v:ident, $x:ty, $y:ty, $o:ty, $a:ident, $b:ident => $e:expr) => {{
        fn apply(x: &$x, y: &$y) -> $o {
            let mut o = [0; 32];
            for i in 0..32 {
                let ($a, $b) = (x[i], y[i]);
                o[i] = $e;
            }
            o
        }
        Lanes::$v(apply)
    }};
}
macro_rules! w2 { ($a:ident, $b:ident => $e:expr) => { two!(W2, Words, Words, Words, $a, $b => $e) }; }
macro_rules! d2 { ($a:ident, $b:ident => $e:expr) => { two!(D2, Doubles, Doubles, Doubles, $a, $b => $e) }; }
macro_rules! d2dw { ($a:ident, $b:ident => $e:expr) => { two!(D2dw, Doubles, Words, Doubles, $a, $b => $e) }; }
macro_rules! d2ww { ($a:ident, $b:ident => $e:expr) => { two!(D2ww, Words, Words, Doubles, $a, $b => $e) }; }
macro_rules! three {
    ($v:ident, $x:ty, $y:ty, $z:ty, $o:ty, $a:ident, $b:ident, $c:ident => $e:expr) => {{
        fn apply(x: &$x, y: &$y, z: &$z) -> $o {
            let mut o = [0; 32];
            for i in 0..32 {
                let ($a, $b, $c) = (x[i], y[i], z[i]);
                o[i] = $e;
            }
            o
        }
        Lanes::$v(apply)
    }};
}
macro_rules! w3 { ($a:ident, $b:ident, $c:ident => $e:expr) => { three!(W3, Words, Words, Words, Words, $a, $b, $c => $e) }; }
macro_rules! d3 { ($a:ident, $b:ident, $c:ident => $e:expr) => { three!(D3, Doubles, Doubles, Doubles, Doubles, $a, $b, $c => $e) }; }
macro_rules! d3wwd { ($a:ident, $b:ident, $c:ident => $e:expr) => { three!(D3wwd, Words, Words, Doubles, Doubles, $a, $b, $c => $e) }; }
macro_rules! w4 {
    ($a:ident, $b:ident, $c:ident, $d:ident => $e:expr) => {{
        fn apply(x: &Words, y: &Words, z: &Words, w: &Words) -> Words {
            let mut o = [0; 32];
            for i in 0..32 {
                let ($a, $b, $c, $d) = (x[i], y[i], z[i], w[i]);
                o[i] = $e;
            }
            o
        }
        Lanes::W4(apply)
    }};
}
macro_rules! compare {
    ($v:ident, $x:ty, $a:ident, $b:ident => $e:expr) => {{
        fn apply(x: &$x, y: &$x) -> u32 {
            let mut o = 0;
            for i in 0..32 {
                let ($a, $b) = (x[i], y[i]);
                o |= u32::from($e) << i;
            }
            o
        }
        Lanes::$v(apply)
    }};
}

/// One definition for every integer type; `$t` names it in the expression.
macro_rules! integers2 { ($ty:expr, $t:ident, $a:ident, $b:ident => $e:expr) => {{
    use Type::*;
    Some(match $ty {
        U16 | B16 => w2!(x, y => { type $t = u16; let ($a, $b) = (x as $t, y as $t); let r: $t = $e; u32::from(r) }),
        S16 => w2!(x, y => { type $t = i16; let ($a, $b) = (x as $t, y as $t); let r: $t = $e; u32::from(r as u16) }),
        U32 | B32 => w2!(x, y => { type $t = u32; let ($a, $b) = (x, y); let r: $t = $e; r }),
        S32 => w2!(x, y => { type $t = i32; let ($a, $b) = (x as $t, y as $t); let r: $t = $e; r as u32 }),
        U64 | B64 => d2!(x, y => { type $t = u64; let ($a, $b) = (x, y); let r: $t = $e; r }),
        S64 => d2!(x, y => { type $t = i64; let ($a, $b) = (x as $t, y as $t); let r: $t = $e; r as u64 }),
        _ => return None,
    })
}}; }

macro_rules! integers1 { ($ty:expr, $t:ident, $a:ident => $e:expr) => {{
    use Type::*;
    Some(match $ty {
        S16 | B16 | U16 => w1!(x => { type $t = i16; let $a = x as $t; let r: $t = $e; u32::from(r as u16) }),
        S32 | B32 | U32 => w1!(x => { type $t = i32; let $a = x as $t; let r: $t = $e; r as u32 }),
        S64 | B64 | U64 => d1!(x => { type $t = i64; let $a = x as $t; let r: $t = $e; r as u64 }),
        _ => return None,
    })
}}; }

/// Four variants of a function by `.ftz` and `.sat`.
macro_rules! finished {
    ($m:ident, $suffixes:expr, $($a:ident),+ => $e:expr) => {
        match ($suffixes.has("ftz"), $suffixes.has("sat")) {
            (false, false) => $m!($($a),+ => { $(let $a = f($a);)+ r($e) }),
            (true, false) => $m!($($a),+ => { $(let $a = flush(f($a));)+ r(flush($e)) }),
            (false, true) => $m!($($a),+ => { $(let $a = f($a);)+ r(saturate($e)) }),
            (true, true) => $m!($($a),+ => { $(let $a = flush(f($a));)+ r(saturate(flush($e))) }),
        }
    };
}
