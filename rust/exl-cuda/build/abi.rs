//! Layouts of the structs and values of the constants that CUDA sources and Rust share, read from the sources.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::kernels;

/// Generate Rust constants from the CUDA sources: `file::Struct::{SIZE, FIELDS, field...}` of the layouts that they state, and
/// `file::NAME` of their constants. `file` is the name without folder and ending.
pub fn shared() -> Result<String, String> {
    let mut files = kernels::sources("cu")?;
    files.extend(kernels::sources("cuh")?);
    let mut modules: BTreeMap<String, String> = BTreeMap::new();
    for path in files.iter().filter(|path| !path.ends_with("abi.cuh")) {
        let source = kernels::read(path)?;
        let structs = layouts_in(&source).map_err(|e| format!("{}: {e}", path.display()))?;
        let file = path.file_stem().expect("a source has a stem").display();
        let module = modules.entry(file.to_string()).or_default();
        module.push_str(&structs);
        module.push_str(&constants_in(&source));
        module.push_str(&enumerators_in(&source));
    }
    let mut text = String::new();
    for (file, content) in modules.iter().filter(|(_, content)| !content.is_empty()) {
        writeln!(text, "#[allow(dead_code)]\npub mod {file} {{\n{content}}}")
            .expect("write to a String");
    }
    Ok(text)
}

/// The constants of one source: lines `constexpr int NAME = 1, OTHER = 2;` outside of functions and structs. Other types and values that
/// are no numbers are skipped.
fn constants_in(source: &str) -> String {
    let mut text = String::new();
    let lists = source.lines().filter_map(|line| {
        ["constexpr int ", "constexpr uint32_t "]
            .iter()
            .find_map(|kind| line.strip_prefix(kind))
    });
    for list in lists {
        let (list, _) = list.split_once(';').unwrap_or((list, ""));
        for (name, value) in list.split(',').filter_map(|one| one.split_once(" = ")) {
            if let Ok(value) = value.trim().parse::<i64>() {
                let name = name.trim();
                writeln!(text, "    pub const {name}: i64 = {value};").expect("write to a String");
            }
        }
    }
    text
}

/// The enumerators of one source: lines `enum Name { FIRST, SECOND = 4 };` outside of functions and structs.
fn enumerators_in(source: &str) -> String {
    let mut text = String::new();
    let lists = source.lines().filter_map(|line| {
        let (_, rest) = line.strip_prefix("enum ")?.split_once('{')?;
        Some(rest.split_once("};")?.0)
    });
    for list in lists {
        let mut next = 0i64;
        for one in list.split(',') {
            let (name, value) = match one.split_once('=') {
                None => (one.trim(), next),
                Some((name, value)) => match value.trim().parse() {
                    Ok(value) => (name.trim(), value),
                    Err(_) => break, // no number: those after it are unknown, too
                },
            };
            writeln!(text, "    pub const {name}: i64 = {value};").expect("write to a String");
            next = value + 1;
        }
    }
    text
}

/// A struct of the CUDA sources: name, size, and names and offsets of its fields, as written.
struct StructLayout<'a> {
    name: &'a str,
    bytes: &'a str,
    fields: Vec<(&'a str, &'a str)>,
}

/// The constants of one source: `ABI_SIZE(Struct, bytes)` begins a struct, and its `ABI_AT(Struct, field, offset)` follow.
fn layouts_in(source: &str) -> Result<String, String> {
    let mut structs: Vec<StructLayout> = Vec::new();
    for call in source.split("ABI_").skip(1) {
        let broken = || format!("expected SIZE(..) or AT(..) after ABI_, found {call:.40}");
        let (kind, rest) = call.split_once('(').ok_or_else(broken)?;
        let (arguments, _) = rest.split_once(')').ok_or_else(broken)?;
        let arguments: Vec<&str> = arguments.split(',').map(str::trim).collect();
        match (kind, &arguments[..], structs.last_mut()) {
            ("SIZE", &[name, bytes], _) => structs.push(StructLayout {
                name,
                bytes,
                fields: Vec::new(),
            }),
            ("AT", &[name, field, at], Some(open)) if open.name == name => {
                open.fields.push((field, at));
            }
            _ => return Err(broken()),
        }
    }
    let mut text = String::new();
    for found in structs {
        let StructLayout {
            name,
            bytes,
            fields,
        } = found;
        let count = fields.len();
        write!(
            text,
            "    #[allow(non_snake_case, non_upper_case_globals)]\n    pub mod {name} {{\n        \
             pub const SIZE: usize = {bytes};\n        pub const FIELDS: usize = {count};\n"
        )
        .expect("write to a String");
        for (field, at) in fields {
            writeln!(text, "        pub const {field}: usize = {at};").expect("write to a String");
        }
        text.push_str("    }\n");
    }
    Ok(text)
}
