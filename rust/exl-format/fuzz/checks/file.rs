use std::io::Write;

use exl_format::safetensors::{self, Header};

use super::rejected;

/// Check a safetensors file made from `input`.
///
/// Byte 0 is the number of data bytes. Byte 1 is the error of the header's length: `b'0'` is none, 255 the largest length
/// there is. The rest is the header.
pub fn safetensors(input: &[u8]) {
    let [data, error, header @ ..] = input else {
        return;
    };
    let length = header.len() as u64;
    let prefix = match error {
        255 => u64::MAX,
        _ => length.wrapping_add_signed(i64::from(*error) - i64::from(b'0')),
    };
    let mut file = prefix.to_le_bytes().to_vec();
    file.extend(header);
    file.resize(file.len() + usize::from(*data), 7);

    match safetensors::parse("file", header, file.len() as u64) {
        Ok(found) => keeps_its_promises(&found, 8 + length, file.len() as u64),
        Err(error) => {
            rejected(&error);
            if prefix == length {
                return; // `read_header` would give the same error, and writing files takes most of the time.
            }
        }
    }

    let path = std::env::temp_dir().join(format!("exl-format-{}.safetensors", std::process::id()));
    let write = std::fs::File::create(&path).and_then(|mut out| out.write_all(&file));
    write.expect("the temporary folder takes a small file");
    match safetensors::read_header(&path) {
        Ok(found) => {
            keeps_its_promises(&found, 8 + prefix, file.len() as u64);
            for tensor in &found.tensors {
                let mut bytes = vec![0; tensor.nbytes as usize];
                safetensors::read_at(&path, Some(&tensor.name), tensor.offset, &mut bytes)
                    .expect("a checked tensor lies in the file");
                assert_eq!(bytes, file[tensor.offset as usize..][..bytes.len()]);
            }
        }
        Err(error) => rejected(&error),
    }
}

/// Require tensors in order, between the header and the end of the file, of the size that shape and dtype give.
fn keeps_its_promises(header: &Header, first: u64, length: u64) {
    let mut end = first;
    for tensor in &header.tensors {
        let elements = tensor.shape.iter().product::<u64>();
        assert_eq!(elements * tensor.dtype.size, tensor.nbytes);
        if tensor.nbytes > 0 {
            assert!(tensor.offset >= end, "{tensor:?} begins before {end}");
            end = tensor.offset + tensor.nbytes;
        }
        assert!(tensor.offset + tensor.nbytes <= length);
    }
}
