//! Reading of files: the header, and data at an offset.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use super::MAX_HEADER;
use super::error::{HeaderProblem, SafetensorsError};
use super::header::{Header, parse};

fn open(path: &Path) -> Result<(File, u64), HeaderProblem> {
    // Checked before opening: opening a pipe would block until its other end is opened.
    if !std::fs::metadata(path)?.is_file() {
        return Err(HeaderProblem::NotAFile);
    }
    let file = File::open(path)?;
    let length = file.metadata()?.len();
    Ok((file, length))
}

/// Read and check the header of the file at `path`.
pub fn read_header(path: &Path) -> Result<Header, SafetensorsError> {
    let name = path.display().to_string();
    let fail = |problem| SafetensorsError::new(&name, None, problem);
    let (header, length) = read_header_bytes(path).map_err(fail)?;
    parse(&name, &header, length)
}

fn read_header_bytes(path: &Path) -> Result<(Vec<u8>, u64), HeaderProblem> {
    let (mut file, file_length) = open(path)?;
    let Some(available) = file_length.checked_sub(8) else {
        return Err(HeaderProblem::TooShort {
            length: file_length,
        });
    };
    let mut prefix = [0u8; 8];
    file.read_exact(&mut prefix)?;
    let length = u64::from_le_bytes(prefix);
    if length > MAX_HEADER {
        return Err(HeaderProblem::HeaderTooLong {
            length,
            limit: MAX_HEADER,
        });
    }
    if length > available {
        return Err(HeaderProblem::HeaderTruncated { length, available });
    }
    let mut header = vec![0u8; length as usize];
    file.read_exact(&mut header)?;
    Ok((header, file_length))
}

/// Fill `out` with the bytes at `offset`. `tensor` names the data, for errors.
pub fn read_at(
    path: &Path,
    tensor: Option<&str>,
    offset: u64,
    out: &mut [u8],
) -> Result<(), SafetensorsError> {
    fill(path, offset, out)
        .map_err(|problem| SafetensorsError::new(&path.display().to_string(), tensor, problem))
}

fn fill(path: &Path, offset: u64, out: &mut [u8]) -> Result<(), HeaderProblem> {
    let (mut file, _) = open(path)?;
    file.seek(SeekFrom::Start(offset))?;
    let mut done = 0;
    while done < out.len() {
        match file.read(&mut out[done..]) {
            Ok(0) => {
                return Err(HeaderProblem::ShortRead {
                    offset,
                    found: done as u64,
                    expected: out.len() as u64,
                });
            }
            Ok(count) => done += count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
