//! Torch tensors seen as plain memory, without linking to torch.
//!
//! A tensor crosses the border as an object; its pointer, shape and dtype are read through attributes that every torch version has. Only
//! this module reads addresses, so no binding takes an address as a bare integer.

#![allow(dead_code)]

use std::convert::Infallible;

use pyo3::exceptions::{PyTypeError, PyValueError};
#[cfg(feature = "stubs")]
use pyo3::inspect::PyStaticExpr;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyTuple;

/// The name of a tensor's type in the generated signatures.
#[cfg(feature = "stubs")]
const TORCH_TENSOR: PyStaticExpr = pyo3::type_hint_identifier!("torch", "Tensor");

/// Element types the kernels know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DType {
    F32,
    F16,
    BF16,
    F64,
    U8,
    I8,
    I16,
    I32,
    I64,
    Bool,
}

impl DType {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::F16 | Self::BF16 | Self::I16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::F64 | Self::I64 => 8,
        }
    }
}

/// Rust types of tensor elements.
pub trait Element: Copy + 'static {
    const DTYPE: DType;
}

macro_rules! element {
    ($($t:ty => $d:ident),*) => { $(impl Element for $t { const DTYPE: DType = DType::$d; })* };
}
element!(f32 => F32, f64 => F64, half::f16 => F16, half::bf16 => BF16, u8 => U8, i8 => I8, i16 => I16, i32 => I32, i64 => I64);

static DTYPES: PyOnceLock<Vec<(Py<PyAny>, DType)>> = PyOnceLock::new();

fn dtype_table(py: Python<'_>) -> PyResult<&Vec<(Py<PyAny>, DType)>> {
    DTYPES.get_or_try_init(py, || {
        let torch = py.import("torch")?;
        let names = [
            ("float32", DType::F32),
            ("float16", DType::F16),
            ("int32", DType::I32),
            ("uint8", DType::U8),
            ("bfloat16", DType::BF16),
            ("float64", DType::F64),
            ("int64", DType::I64),
            ("int16", DType::I16),
            ("int8", DType::I8),
            ("bool", DType::Bool),
        ];
        names
            .iter()
            .map(|(name, dtype)| Ok((torch.getattr(*name)?.unbind(), *dtype)))
            .collect()
    })
}

/// A contiguous tensor, borrowed from Python for the length of one call, or kept alive by the object that stores `owner`.
#[derive(Debug)]
pub struct Tensor {
    pub ptr: usize,
    pub shape: Vec<usize>,
    pub dtype: DType,
    /// CUDA device index; `None` on the CPU.
    pub cuda: Option<u32>,
    /// The Python object; keep it as long as `ptr`.
    pub owner: Py<PyAny>,
}

impl<'a, 'py> FromPyObject<'a, 'py> for Tensor {
    type Error = PyErr;

    #[cfg(feature = "stubs")]
    const INPUT_TYPE: PyStaticExpr = TORCH_TENSOR;

    fn extract(obj: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let py = obj.py();
        let dtype_obj = obj.getattr(pyo3::intern!(py, "dtype"))?;
        let dtype = dtype_table(py)?
            .iter()
            .find(|(known, _)| known.is(&dtype_obj))
            .map(|(_, dtype)| *dtype)
            .ok_or_else(|| PyTypeError::new_err(format!("unsupported tensor dtype {dtype_obj}")))?;
        if !obj
            .call_method0(pyo3::intern!(py, "is_contiguous"))?
            .extract::<bool>()?
        {
            return Err(PyValueError::new_err(
                "tensor is not contiguous: call .contiguous() first",
            ));
        }
        let shape = obj
            .getattr(pyo3::intern!(py, "shape"))?
            .cast_into::<PyTuple>()
            .map_err(PyErr::from)?
            .iter()
            .map(|d| d.extract::<usize>())
            .collect::<PyResult<Vec<_>>>()?;
        let cuda = if obj
            .getattr(pyo3::intern!(py, "is_cpu"))?
            .extract::<bool>()?
        {
            None
        } else if obj
            .getattr(pyo3::intern!(py, "is_cuda"))?
            .extract::<bool>()?
        {
            Some(
                obj.call_method0(pyo3::intern!(py, "get_device"))?
                    .extract::<u32>()?,
            )
        } else {
            // Meta tensors and the like have no memory to point at.
            let device = obj.getattr(pyo3::intern!(py, "device"))?;
            return Err(PyTypeError::new_err(format!(
                "tensor is on device {device}, expected cpu or cuda"
            )));
        };
        let ptr = obj
            .call_method0(pyo3::intern!(py, "data_ptr"))?
            .extract::<usize>()?;
        Ok(Self {
            ptr,
            shape,
            dtype,
            cuda,
            owner: obj.to_owned().unbind(),
        })
    }
}

/// A tensor that Python has handed over, for getters of the object that stores it.
impl<'a, 'py> IntoPyObject<'py> for &'a Tensor {
    type Target = PyAny;
    type Output = Borrowed<'a, 'py, PyAny>;
    type Error = Infallible;

    #[cfg(feature = "stubs")]
    const OUTPUT_TYPE: PyStaticExpr = TORCH_TENSOR;

    fn into_pyobject(self, py: Python<'py>) -> Result<Self::Output, Self::Error> {
        Ok(self.owner.bind_borrowed(py))
    }
}

/// A tensor that Rust allocates and returns to Python.
#[derive(Debug)]
pub struct TensorObject(pub Py<PyAny>);

impl<'a, 'py> IntoPyObject<'py> for &'a TensorObject {
    type Target = PyAny;
    type Output = Borrowed<'a, 'py, PyAny>;
    type Error = Infallible;

    #[cfg(feature = "stubs")]
    const OUTPUT_TYPE: PyStaticExpr = TORCH_TENSOR;

    fn into_pyobject(self, py: Python<'py>) -> Result<Self::Output, Self::Error> {
        Ok(self.0.bind_borrowed(py))
    }
}

impl TensorObject {
    /// The tensor's memory.
    pub fn view(&self, py: Python<'_>) -> PyResult<Tensor> {
        self.0.bind(py).extract()
    }
}

impl Tensor {
    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    fn check<T: Element>(&self, what: &str) -> PyResult<()> {
        if self.dtype != T::DTYPE {
            return Err(PyTypeError::new_err(format!(
                "{what}: dtype {:?}, expected {:?}",
                self.dtype,
                T::DTYPE
            )));
        }
        if self.cuda.is_some() {
            return Err(PyTypeError::new_err(format!(
                "{what}: tensor is on a GPU, expected CPU memory"
            )));
        }
        Ok(())
    }

    /// The elements as a slice. `what` names the argument in errors.
    ///
    /// The caller must not let Python write to the tensor while the slice lives; kernels run while the caller waits.
    pub fn slice<T: Element>(&self, what: &str) -> PyResult<&[T]> {
        self.check::<T>(what)?;
        if self.numel() == 0 {
            return Ok(&[]);
        }
        // SAFETY: torch owns `numel` contiguous, aligned, initialised elements of this dtype at `ptr`, and `owner` keeps them alive.
        Ok(unsafe { std::slice::from_raw_parts(self.ptr as *const T, self.numel()) })
    }

    /// The elements as a mutable slice; the caller must not pass another view of the same memory to the same call.
    #[allow(clippy::mut_from_ref)]
    pub fn slice_mut<T: Element>(&self, what: &str) -> PyResult<&mut [T]> {
        self.check::<T>(what)?;
        if self.numel() == 0 {
            return Ok(&mut []);
        }
        // SAFETY: as above; exclusive because Python-side wrappers pass new or exclusively owned outputs.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.ptr as *mut T, self.numel()) })
    }
}

/// Reject two tensors of different shape. The Python wrappers check this first, with a better message.
pub fn same_shape(what: &str, got: &Tensor, expected: &[usize]) -> PyResult<()> {
    if got.shape == expected {
        Ok(())
    } else {
        Err(PyValueError::new_err(format!(
            "{what}: shape {:?}, expected {expected:?}",
            got.shape
        )))
    }
}

/// Reject two tensors of different size. The Python wrappers check this first, with a better message.
pub fn same_length(what: &str, got: usize, expected: usize) -> PyResult<()> {
    if got == expected {
        Ok(())
    } else {
        Err(PyValueError::new_err(format!(
            "{what}: {got} elements, expected {expected}"
        )))
    }
}
