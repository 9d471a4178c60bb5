//! Parsing and checks of the JSON header.

use std::collections::{BTreeMap, HashSet};
use std::fmt;

use serde::Deserialize;
use serde::de::{MapAccess, Visitor};

use super::error::{HeaderProblem, SafetensorsError, clip};
use super::{MAX_DIMENSIONS, MAX_HEADER};

/// Element types of tensors; whole bytes only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DType {
    /// The spelling in headers.
    pub name: &'static str,
    /// Bytes of one element.
    pub size: u64,
}

const DTYPES: [DType; 16] = [
    DType {
        name: "F16",
        size: 2,
    },
    DType {
        name: "BF16",
        size: 2,
    },
    DType {
        name: "F32",
        size: 4,
    },
    DType {
        name: "I32",
        size: 4,
    },
    DType {
        name: "I16",
        size: 2,
    },
    DType {
        name: "F64",
        size: 8,
    },
    DType {
        name: "I64",
        size: 8,
    },
    DType {
        name: "I8",
        size: 1,
    },
    DType {
        name: "U8",
        size: 1,
    },
    DType {
        name: "U16",
        size: 2,
    },
    DType {
        name: "U32",
        size: 4,
    },
    DType {
        name: "U64",
        size: 8,
    },
    DType {
        name: "BOOL",
        size: 1,
    },
    DType {
        name: "F8_E4M3",
        size: 1,
    },
    DType {
        name: "F8_E5M2",
        size: 1,
    },
    DType {
        name: "F8_E8M0",
        size: 1,
    },
];
pub(super) const KNOWN: &str =
    "F16, BF16, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64, BOOL, F8_E4M3, F8_E5M2, F8_E8M0";

/// One tensor of a checked header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    pub name: String,
    pub dtype: DType,
    pub shape: Vec<u64>,
    /// First byte, relative to the start of the file.
    pub offset: u64,
    /// Number of bytes; equals dtype times shape.
    pub nbytes: u64,
}

/// A checked header: every tensor is within the file, has the size of its shape, and overlaps no other tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// In the order of their data.
    pub tensors: Vec<TensorInfo>,
    pub metadata: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct RawInfo {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// Entries in file order, so that duplicate names are detected.
#[derive(Default)]
struct RawHeader {
    entries: Vec<(String, RawInfo)>,
    metadata: Option<BTreeMap<String, String>>,
    duplicate: Option<String>,
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensor entries")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut header = RawHeader::default();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        if header.metadata.is_some() {
                            header.duplicate = Some(name);
                        }
                        header.metadata = Some(map.next_value()?);
                    } else {
                        let info = map.next_value::<RawInfo>()?;
                        header.entries.push((name, info));
                    }
                }
                Ok(header)
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// Check the header bytes of a file of `file_length` bytes. `file` is its name, for errors.
pub fn parse(file: &str, header: &[u8], file_length: u64) -> Result<Header, SafetensorsError> {
    let fail = |tensor: Option<&str>, problem| SafetensorsError::new(file, tensor, problem);
    let header_length = header.len() as u64;
    if header_length > MAX_HEADER {
        return Err(fail(
            None,
            HeaderProblem::HeaderTooLong {
                length: header_length,
                limit: MAX_HEADER,
            },
        ));
    }
    let data_start = 8 + header_length;
    let available = file_length.checked_sub(data_start).ok_or_else(|| {
        fail(
            None,
            HeaderProblem::HeaderTruncated {
                length: header_length,
                available: file_length.saturating_sub(8),
            },
        )
    })?;
    let raw: RawHeader = serde_json::from_slice(header)
        .map_err(|error| fail(None, HeaderProblem::Json(clip(&error.to_string()))))?;
    if let Some(name) = &raw.duplicate {
        return Err(fail(Some(name), HeaderProblem::Duplicate));
    }
    let mut names = HashSet::with_capacity(raw.entries.len());
    if let Some((name, _)) = raw
        .entries
        .iter()
        .find(|(name, _)| !names.insert(name.as_str()))
    {
        return Err(fail(Some(name), HeaderProblem::Duplicate));
    }
    drop(names);
    let mut tensors = Vec::with_capacity(raw.entries.len());
    for (name, info) in raw.entries {
        match check_entry(&info, available) {
            Ok((dtype, nbytes)) => tensors.push(TensorInfo {
                name,
                dtype,
                shape: info.shape,
                offset: data_start + info.data_offsets.0,
                nbytes,
            }),
            Err(problem) => return Err(fail(Some(&name), problem)),
        }
    }
    tensors.sort_by(|a, b| (a.offset, a.nbytes, &a.name).cmp(&(b.offset, b.nbytes, &b.name)));
    check_overlap(&tensors).map_err(|(name, problem)| fail(Some(name), problem))?;
    Ok(Header {
        tensors,
        metadata: raw.metadata.unwrap_or_default(),
    })
}

fn check_entry(info: &RawInfo, available: u64) -> Result<(DType, u64), HeaderProblem> {
    let dtype = DTYPES
        .into_iter()
        .find(|dtype| dtype.name == info.dtype)
        .ok_or_else(|| HeaderProblem::DType(clip(&info.dtype)))?;
    if info.shape.len() > MAX_DIMENSIONS {
        return Err(HeaderProblem::Dimensions {
            count: info.shape.len(),
            limit: MAX_DIMENSIONS,
        });
    }
    // A zero makes the tensor empty, but the other sizes must still be valid for the caller that allocates it.
    let bytes = info
        .shape
        .iter()
        .filter(|&&size| size != 0)
        .try_fold(dtype.size, |bytes, &size| bytes.checked_mul(size))
        .filter(|&bytes| i64::try_from(bytes).is_ok())
        .ok_or_else(|| HeaderProblem::Overflow {
            shape: info.shape.clone(),
        })?;
    let expected = if info.shape.contains(&0) { 0 } else { bytes };
    let (begin, end) = info.data_offsets;
    let found = end
        .checked_sub(begin)
        .ok_or(HeaderProblem::Backwards { begin, end })?;
    if end > available {
        return Err(HeaderProblem::OutOfRange { end, available });
    }
    if found != expected {
        return Err(HeaderProblem::Size { expected, found });
    }
    Ok((dtype, expected))
}

/// `tensors` must be sorted by offset.
fn check_overlap(tensors: &[TensorInfo]) -> Result<(), (&str, HeaderProblem)> {
    let mut last: Option<&TensorInfo> = None;
    for tensor in tensors.iter().filter(|tensor| tensor.nbytes > 0) {
        if let Some(other) = last {
            let other_end = other.offset + other.nbytes;
            if tensor.offset < other_end {
                return Err((
                    &tensor.name,
                    HeaderProblem::Overlap {
                        other: clip(&other.name),
                        other_end,
                        begin: tensor.offset,
                    },
                ));
            }
        }
        last = Some(tensor);
    }
    Ok(())
}
