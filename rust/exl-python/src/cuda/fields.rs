//! Places of fields in memory that Python fills in.

use exl_cuda::fields::Field;
use exl_cuda::ops::linear::lora::LoraEntry;
use pyo3::prelude::*;

/// A field of memory that Python fills in and kernels read, in bytes.
#[pyclass(frozen, get_all, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct MemoryField {
    name: &'static str,
    offset: usize,
    /// All elements.
    size: usize,
    /// One element.
    element: usize,
}

impl From<Field> for MemoryField {
    fn from(field: Field) -> Self {
        let Field {
            name,
            offset,
            size,
            element,
        } = field;
        Self {
            name,
            offset,
            size,
            element,
        }
    }
}

/// Return the fields of an entry of a table of adapters: device addresses and the rank, 64-bit integers.
#[pyfunction]
pub fn lora_entry_fields() -> Vec<MemoryField> {
    LoraEntry::FIELDS.map(MemoryField::from).into()
}
