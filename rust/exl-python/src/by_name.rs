//! Structs that are read from objects of Python classes, whose attributes have the same names and types.

/// The value of an attribute, whose name the macro has interned.
macro_rules! attribute {
    ($object:expr, $name:expr) => {
        $object.getattr(pyo3::intern!($object.py(), $name))?
    };
}
pub(crate) use attribute;

/// Structs with the fields of classes of a Python module.
macro_rules! read_by_name {
    ($module:literal: $($(#[$about:meta])* $of:vis struct $name:ident of $class:literal {
        $($(#[$note:meta])* $shown:vis $field:ident: $kind:ty,)*
    })*) => {$(
        $(#[$about])*
        $of struct $name {
            $($(#[$note])* $shown $field: $kind,)*
        }

        impl<'a, 'py> FromPyObject<'a, 'py> for $name {
            type Error = PyErr;

            #[cfg(feature = "stubs")]
            const INPUT_TYPE: pyo3::inspect::PyStaticExpr =
                pyo3::type_hint_identifier!($module, $class);

            fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
                Ok(Self {
                    $($field: $crate::by_name::attribute!(object, stringify!($field)).extract()?,)*
                })
            }
        }
    )*};
}
pub(crate) use read_by_name;
