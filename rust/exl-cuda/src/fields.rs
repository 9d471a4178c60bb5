//! Places of fields in memory that Python fills in and kernels read.

/// A field of such memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    pub name: &'static str,
    pub offset: usize,
    /// All elements.
    pub size: usize,
    /// One element.
    pub element: usize,
}

impl Field {
    /// The offset after the field.
    pub const fn end(&self) -> usize {
        self.offset + self.size
    }
}

/// The size of the field that a function returns.
pub(crate) const fn size_of_field<S, F>(_: fn(&S) -> &F) -> usize {
    size_of::<F>()
}

/// `struct_fields!(Struct, { field, .. })`: the [`Field`]s of a `repr(C)` struct, all of which must be listed. `assert_layout!` compares
/// the same offsets with those of the CUDA struct.
macro_rules! struct_fields {
    ($rust:ident, { $($field:ident),* $(,)? }) => {{
        const fn listed(value: &$rust) {
            let $rust { $($field: _),* } = value;
        }
        const _: fn(&$rust) = listed;
        [$({
            let size = $crate::fields::size_of_field(|value: &$rust| &value.$field);
            $crate::fields::Field {
                name: stringify!($field),
                offset: std::mem::offset_of!($rust, $field),
                size,
                element: size,
            }
        }),*]
    }};
}
pub(crate) use struct_fields;
