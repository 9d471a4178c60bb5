//! The CUDA sources.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

/// `kernels/`, the root of quoted includes.
pub fn folder() -> PathBuf {
    Path::new(&env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("kernels")
}

pub fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))
}

/// The files with this extension in the folders of `kernels/`, sorted by name; names are unique.
pub fn sources(extension: &str) -> Result<Vec<PathBuf>, String> {
    let mut files = Vec::new();
    let mut folders = vec![folder()];
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
        for path in entries.filter_map(|entry| entry.ok().map(|e| e.path())) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == extension) {
                files.push(path);
            }
        }
    }
    files.sort_by(|a, b| a.file_name().cmp(&b.file_name()));
    match files
        .windows(2)
        .find(|pair| pair[0].file_name() == pair[1].file_name())
    {
        None => Ok(files),
        Some(pair) => Err(format!(
            "{} and {} have one name, which names the image: rename one",
            pair[0].display(),
            pair[1].display()
        )),
    }
}

/// The headers of `kernels/` that a source includes directly or indirectly: names and texts.
pub fn headers_of(text: &str) -> Result<Vec<(String, String)>, String> {
    let mut found: Vec<(String, String)> = Vec::new();
    let mut texts = vec![text.to_owned()];
    while let Some(text) = texts.pop() {
        for name in text.lines().filter_map(|line| {
            line.strip_prefix("#include \"")
                .and_then(|rest| rest.split('"').next())
        }) {
            if found.iter().any(|(known, _)| known == name) {
                continue;
            }
            let inner = read(&folder().join(name))?;
            texts.push(inner.clone());
            found.push((name.to_owned(), inner));
        }
    }
    found.sort();
    Ok(found)
}
