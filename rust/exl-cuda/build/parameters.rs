//! Parameters of the kernels, read from the CUDA sources.
//!
//! For each kernel the build generates its list of parameters, which launches are compared with, and for kernels that take the same
//! parameters a Rust struct with one field for each. A launch fills in such a struct (src/parameters.rs).

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use crate::kernels;
use crate::macros::{Macros, is_word, without_comments};

/// A type that a kernel takes by value.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Pointer,
    /// A number: its name in Rust.
    Number(&'static str),
    /// A struct: its name in CUDA.
    Struct(String),
}

/// Name and type of each parameter.
type Parameters = Vec<(String, Kind)>;

/// A kernel: file of its definition, its name and its parameters. Macros define kernels of one kind in several files.
struct Kernel {
    file: String,
    definition: String,
    name: String,
    parameters: Parameters,
}

/// The generated Rust file.
pub fn generated() -> Result<String, String> {
    let mut found = Vec::new();
    for path in kernels::sources("cu")? {
        let file = path.file_stem().expect("a source has a stem").display();
        kernels_in(&path, &file.to_string(), &mut found)
            .map_err(|e| format!("{}: {e}", path.display()))?;
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    if let Some(pair) = found.windows(2).find(|pair| pair[0].name == pair[1].name) {
        let (name, one, other) = (&pair[0].name, &pair[0].file, &pair[1].file);
        return Err(format!("kernel {name} is in {one} and in {other}"));
    }
    let structs = structs_of(&found)?;
    let modules = [module_of_structs(&structs), module_of_markers()?];
    Ok(table(&found) + &modules.concat())
}

/// The kernels of one source, in the order of their definition.
fn kernels_in(path: &Path, file: &str, found: &mut Vec<Kernel>) -> Result<(), String> {
    let source = kernels::read(path)?;
    let mut macros = Macros::default();
    let mut texts = vec![];
    for (name, header) in kernels::headers_of(&source)? {
        texts.push(macros.take_from(&name, &without_comments(&header))?);
    }
    texts.push(macros.take_from(file, &without_comments(&source))?);
    for text in texts {
        macros.each_definition(&text, file, &mut |text, definition| {
            let (name, parameters) = signature(text)?;
            found.push(Kernel {
                file: file.to_owned(),
                definition: definition.to_owned(),
                name,
                parameters,
            });
            Ok(())
        })?;
    }
    Ok(())
}

/// Name and parameters of a kernel, from its definition after `__global__`.
fn signature(text: &str) -> Result<(String, Parameters), String> {
    let shown: String = text.chars().take(100).collect();
    let broken = || format!("no kernel with a body after __global__: {shown}");
    let (head, _) = text.split_once('{').ok_or_else(broken)?;
    let list = head.trim_end().strip_suffix(')').ok_or_else(broken)?;
    let mut depth = 1;
    let open = list
        .char_indices()
        .rev()
        .find(|&(_, c)| {
            depth += i32::from(c == ')') - i32::from(c == '(');
            depth == 0
        })
        .ok_or_else(broken)?
        .0;
    let name = list[..open]
        .rsplit(|c| !is_word(c))
        .find(|word| !word.is_empty())
        .ok_or_else(broken)?;
    let parameters = list[open + 1..]
        .split(',')
        .filter(|one| !one.trim().is_empty())
        .map(|one| parameter(one).ok_or_else(|| format!("{name}: no kind of parameter: {one}")))
        .collect::<Result<_, _>>()?;
    Ok((name.to_owned(), parameters))
}

/// Name and kind of a parameter such as `const __half* x`.
fn parameter(text: &str) -> Option<(String, Kind)> {
    let text = text.trim();
    let at = text.rfind(|c| !is_word(c))? + 1;
    let (kind, name) = text.split_at(at);
    if kind.contains(['&', '<', '[']) || name.is_empty() {
        return None;
    }
    if kind.contains('*') {
        return Some((name.to_owned(), Kind::Pointer));
    }
    let words: Vec<&str> = kind
        .split_whitespace()
        .filter(|word| !["const", "__grid_constant__"].contains(word))
        .collect();
    let kind = match words[..] {
        ["int" | "int32_t"] => Kind::Number("i32"),
        ["unsigned" | "uint32_t"] | ["unsigned", "int"] => Kind::Number("u32"),
        ["int64_t"] => Kind::Number("i64"),
        ["uint64_t" | "size_t"] => Kind::Number("u64"),
        ["float"] => Kind::Number("f32"),
        ["double"] => Kind::Number("f64"),
        [name] if name.starts_with(|c: char| c.is_ascii_uppercase()) => {
            Kind::Struct(name.to_owned())
        }
        _ => return None,
    };
    Some((name.to_owned(), kind))
}

/// The Rust structs: name, parameters, and kernels. Kernels that one file defines with equal parameters share a struct, which has their
/// names' common beginning.
fn structs_of(found: &[Kernel]) -> Result<BTreeMap<String, (Parameters, Vec<String>)>, String> {
    let mut groups: BTreeMap<(&str, &Parameters), Vec<&str>> = BTreeMap::new();
    for kernel in found {
        let group = groups.entry((&kernel.definition, &kernel.parameters));
        group.or_default().push(&kernel.name);
    }
    let mut structs: BTreeMap<String, (Parameters, Vec<String>)> = BTreeMap::new();
    for ((definition, parameters), names) in groups {
        let name = camel_case(common_beginning(&names));
        if name.is_empty() {
            return Err(format!(
                "{definition}: kernels with equal parameters have no common beginning of their names: {}",
                names.join(", ")
            ));
        }
        let one = structs
            .entry(name)
            .or_insert_with(|| (parameters.clone(), Vec::new()));
        if one.0 != *parameters {
            return Err(format!(
                "{} and {} take other parameters, but their names begin alike: rename one",
                one.1[0], names[0]
            ));
        }
        one.1.extend(names.iter().map(|&name| name.to_owned()));
    }
    Ok(structs)
}

/// The words with which all names begin.
fn common_beginning<'a>(names: &[&'a str]) -> &'a str {
    let first = names[0];
    let all = |&at: &usize| {
        names.iter().all(|name| {
            name.starts_with(&first[..at]) && matches!(name.as_bytes().get(at), None | Some(b'_'))
        })
    };
    let ends = (0..=first.len()).filter(|&at| first.is_char_boundary(at));
    &first[..ends.filter(all).max().unwrap_or(0)]
}

fn camel_case(name: &str) -> String {
    let capital = |word: &str| word[..1].to_uppercase() + &word[1..];
    name.split('_')
        .filter(|word| !word.is_empty())
        .map(capital)
        .collect()
}

/// All kernels: name, file and parameters, sorted by name.
fn table(found: &[Kernel]) -> String {
    let mut text = String::from(
        "/// Name, file and parameters of each kernel, sorted by name.\n\
         pub(crate) static KERNELS: &[(&str, &str, &[Parameter])] = &[\n",
    );
    for Kernel {
        file,
        name,
        parameters,
        ..
    } in found
    {
        writeln!(text, "    ({name:?}, {file:?}, {}),", list(parameters)).expect("a String");
    }
    text + "];\n"
}

fn list(parameters: &Parameters) -> String {
    let one = |(name, kind): &(String, Kind)| {
        let kind = match kind {
            Kind::Pointer => "Kind::Pointer".to_owned(),
            Kind::Number(number) => format!("Kind::Number({number:?})"),
            Kind::Struct(name) => format!("Kind::Struct({name:?}, cuda::{name}::BYTES)"),
        };
        format!("Parameter {{ name: {name:?}, kind: {kind} }}")
    };
    let all: Vec<String> = parameters.iter().map(one).collect();
    format!("&[{}]", all.join(", "))
}

/// The structs of parameters.
fn module_of_structs(structs: &BTreeMap<String, (Parameters, Vec<String>)>) -> String {
    let mut text = String::from(
        "/// Parameters of the kernels: a struct for those that take the same.\n\
         #[allow(dead_code)]\n\
         pub(crate) mod kernels {\n    use super::{Kind, Parameter, Parameters, Passed, c_void, cuda};\n",
    );
    for (name, (parameters, names)) in structs {
        let (mut bounds, mut letters) = (Vec::new(), Vec::new());
        let (mut fields, mut addresses) = (String::new(), Vec::new());
        for (field, kind) in parameters {
            let field = raw(field);
            let kind = match kind {
                Kind::Pointer => "usize".to_owned(),
                Kind::Number(number) => (*number).to_owned(),
                Kind::Struct(of) => {
                    let letter = format!("S{}", letters.len());
                    bounds.push(format!("{letter}: Passed<Cuda = cuda::{of}>"));
                    letters.push(letter.clone());
                    letter
                }
            };
            writeln!(fields, "        pub {field}: {kind},").expect("a String");
            addresses.push(format!("(&raw mut self.{field}).cast()"));
        }
        let (bounds, letters) = (bounds.join(", "), letters.join(", "));
        let (list, count) = (list(parameters), parameters.len());
        let (names, addresses) = (names.join(", "), addresses.join(", "));
        write!(
            text,
            "    /// Of {names}.\n    pub struct {name}<{bounds}> {{\n{fields}    }}\n    \
             impl<{bounds}> Parameters for {name}<{letters}> {{\n        \
             const LIST: &'static [Parameter] = {list};\n        \
             type Addresses = [*mut c_void; {count}];\n        \
             fn addresses(&mut self) -> Self::Addresses {{ [{addresses}] }}\n    }}\n"
        )
        .expect("a String");
    }
    text + "}\n"
}

/// A type for each CUDA struct whose layout the sources state.
fn module_of_markers() -> Result<String, String> {
    let mut stated = BTreeMap::new();
    for path in [kernels::sources("cu")?, kernels::sources("cuh")?].concat() {
        let source = kernels::read(&path)?;
        for line in source.lines() {
            let size = line.trim_start().strip_prefix("ABI_SIZE(");
            if let Some((name, rest)) = size.and_then(|rest| rest.split_once(','))
                && let Some((bytes, _)) = rest.split_once(')')
            {
                stated.insert(name.to_owned(), bytes.trim().to_owned());
            }
        }
    }
    let mut text = String::from(
        "/// The CUDA structs, with their sizes.\n#[allow(dead_code)]\npub(crate) mod cuda {\n",
    );
    for (name, bytes) in stated {
        writeln!(
            text,
            "    pub enum {name} {{}}\n    \
             impl {name} {{ pub const BYTES: usize = {bytes}; }}"
        )
        .expect("a String");
    }
    Ok(text + "}\n")
}

/// A field's name: names that Rust reserves are written as `r#in`.
fn raw(name: &str) -> String {
    let reserved = [
        "in", "type", "ref", "move", "match", "loop", "mod", "use", "where",
    ];
    let prefix = if reserved.contains(&name) { "r#" } else { "" };
    format!("{prefix}{name}")
}
