//! Compile-time comparison of `repr(C)` structs with the CUDA structs that they are passed as, and of constants with those of the kernels.
//!
//! The CUDA sources state size and offsets (`ABI_SIZE`, `ABI_AT` of `kernels/common/abi.cuh`), and nvcc checks them there. `build/abi.rs`
//! turns the same lines into constants, which [`assert_layout`] compares with the Rust struct. It also reads the `constexpr` and `enum`
//! lines of the sources for [`assert_constants`].

include!(concat!(env!("OUT_DIR"), "/abi.rs"));

/// `assert_layout!(Rust, file::Cuda, { field, field as cuda_name, .. })` fails the build unless `Rust` has the size of the CUDA struct, the
/// same number of fields, and each listed field at the same offset. All fields must be listed. Kernels can then take the struct.
macro_rules! assert_layout {
    ($rust:ident, $file:ident::$cuda:ident, { $($field:ident $(as $name:ident)?),* $(,)? }) => {
        const _: () = {
            use $crate::abi::$file::$cuda as cuda;
            // A field that is not listed does not compile.
            const fn listed(value: &$rust) -> usize {
                let $rust { $($field: _),* } = value;
                [$(stringify!($field)),*].len()
            }
            const _: fn(&$rust) -> usize = listed;
            assert!(
                [$(stringify!($field)),*].len() == cuda::FIELDS,
                concat!(stringify!($cuda), " has another number of fields")
            );
            assert!(
                size_of::<$rust>() == cuda::SIZE,
                concat!(stringify!($cuda), " has another size")
            );
            $(assert!(
                std::mem::offset_of!($rust, $field) == $crate::abi::assert_layout!(@offset $field $($name)?),
                concat!(stringify!($cuda), " has this field elsewhere: ", stringify!($field))
            );)*
        };
        impl $crate::parameters::Passed for $rust {
            type Cuda = $crate::parameters::cuda::$cuda;
        }
    };
    (@offset $field:ident) => { cuda::$field };
    (@offset $field:ident $name:ident) => { cuda::$name };
}
pub(crate) use assert_layout;

/// `assert_constants!(file, { CUDA == rust, .. })` fails the build unless each constant of that CUDA source has the value of Rust.
macro_rules! assert_constants {
    ($file:ident, { $($name:ident == $value:expr),* $(,)? }) => {
        $(const _: () = assert!(
            $crate::abi::$file::$name == $value as i64,
            concat!(stringify!($file), "::", stringify!($name), " has another value in Rust")
        );)*
    };
}
pub(crate) use assert_constants;
