//! Statements to decoded instructions; functions are inlined where they are called.

mod line;
mod matrix;
mod memory;
mod warps;

use std::collections::HashMap;
use std::sync::Arc;

use crate::code::{Instruction, Kernel, Op, Participants, Special, Value};
use crate::lanes::Suffixes;
use crate::memory::SHARED_START;
use crate::parse::{self, Function, Operand, Raw, Source, Statement, Width};

use line::Line;

/// Decode the entry `name`. `globals` has the addresses of the module's variables.
pub fn decode(
    source: &Source,
    name: &str,
    globals: &HashMap<String, u64>,
    lines: &Arc<Vec<String>>,
) -> Result<Kernel, String> {
    let entry = source
        .functions
        .iter()
        .find(|f| f.is_entry && f.name == name)
        .ok_or_else(|| format!("no entry {name}"))?;
    let mut decoder = Decoder {
        source,
        globals,
        code: Vec::new(),
        tables: Vec::new(),
        table_labels: Vec::new(),
        widths: Vec::new(),
        labels: HashMap::new(),
        patches: Vec::new(),
        shared: HashMap::new(),
        local_bytes: 0,
        instances: 0,
    };
    let (static_end, dynamic_at) = decoder.place_shared(entry);
    let mut params = Vec::new();
    let mut at = 0usize;
    let mut symbols = HashMap::new();
    for param in &entry.params {
        at = at.next_multiple_of(param.align.max(1));
        params.push((at, param.size));
        symbols.insert(param.name.clone(), Place::Param(at as u64));
        at += param.size;
    }
    decoder.function(entry, symbols, None, 0)?;
    decoder.push(0, None, Op::Exit, vec![], vec![]);
    decoder.resolve()?;
    let wgmma = |i: &Instruction| matches!(i.op, Op::WarpgroupProduct(_));
    let has_wgmma = decoder.code.iter().any(wgmma);
    let mut kernel = Kernel {
        name: name.to_owned(),
        code: decoder.code,
        tables: decoder.tables,
        words: 0,
        doubles: 0,
        preds: 0,
        params,
        param_bytes: at,
        static_shared: static_end - SHARED_START,
        dynamic_at,
        local_bytes: decoder.local_bytes.next_multiple_of(16),
        min_blocks: entry.min_blocks.unwrap_or(1),
        has_wgmma,
        lines: Arc::clone(lines),
    };
    crate::registers::assign(&mut kernel, &decoder.widths);
    Ok(kernel)
}

/// An instruction without its line and guard: operation, lanes that take part, results and operands.
type Decoded = (Op, Participants, Vec<Value>, Vec<Value>);

/// The location of a symbol.
#[derive(Clone, Copy, Debug)]
enum Place {
    Param(u64),
    Local(u64),
}

struct Decoder<'a> {
    source: &'a Source,
    globals: &'a HashMap<String, u64>,
    code: Vec<Instruction>,
    tables: Vec<Vec<u32>>,
    table_labels: Vec<Vec<String>>,
    widths: Vec<Width>,
    labels: HashMap<String, u32>,
    /// Branches whose label is not resolved yet.
    patches: Vec<(usize, String)>,
    shared: HashMap<String, u64>,
    local_bytes: usize,
    instances: usize,
}

/// One inlined function.
struct Instance<'a> {
    function: &'a Function,
    first_register: usize,
    symbols: HashMap<String, Place>,
    prefix: usize,
    /// The label after a call; `None` in an entry.
    end: Option<String>,
    tables: HashMap<String, usize>,
    depth: usize,
}

impl<'a> Decoder<'a> {
    /// Give addresses to the shared variables that a kernel uses; returns the end of static memory and the start of dynamic memory.
    fn place_shared(&mut self, entry: &'a Function) -> (usize, usize) {
        let mut names = Vec::new();
        let mut functions = vec![entry];
        let mut seen: Vec<&str> = Vec::new();
        while let Some(function) = functions.pop() {
            if seen.contains(&function.name.as_str()) {
                continue;
            }
            seen.push(&function.name);
            for statement in &function.body {
                if let Statement::Instruction(raw) = statement {
                    for operand in &raw.operands {
                        symbols_of(operand, &mut names);
                    }
                }
            }
            functions.extend(
                self.source
                    .functions
                    .iter()
                    .filter(|f| names.contains(&f.name.as_str())),
            );
        }
        let of_functions = self.source.functions.iter().flat_map(|f| &f.variables);
        let variables: Vec<_> = self
            .source
            .variables
            .iter()
            .chain(of_functions)
            .filter(|v| v.space == parse::Space::Shared && names.contains(&v.name.as_str()))
            .collect();
        let mut at = SHARED_START;
        for variable in variables.iter().filter(|v| v.size > 0) {
            at = at.next_multiple_of(variable.align);
            self.shared.insert(variable.name.clone(), at as u64);
            at += variable.size;
        }
        let dynamic: Vec<_> = variables.iter().filter(|v| v.size == 0).collect();
        let align = dynamic.iter().map(|v| v.align).max().unwrap_or(16).max(16);
        let dynamic_at = at.next_multiple_of(align);
        for variable in dynamic {
            self.shared.insert(variable.name.clone(), dynamic_at as u64);
        }
        (at, dynamic_at)
    }

    fn push(
        &mut self,
        line: u32,
        guard: Option<(u32, bool)>,
        op: Op,
        to: Vec<Value>,
        from: Vec<Value>,
    ) {
        self.code.push(Instruction {
            op,
            guard,
            participants: Participants::None,
            line,
            to: to.into_boxed_slice(),
            from: from.into_boxed_slice(),
        });
    }

    fn function(
        &mut self,
        function: &'a Function,
        mut symbols: HashMap<String, Place>,
        end: Option<String>,
        depth: usize,
    ) -> Result<(), String> {
        if depth > 16 {
            return Err(format!("{} calls itself", function.name));
        }
        for variable in &function.variables {
            if matches!(variable.space, parse::Space::Local | parse::Space::Param) {
                self.local_bytes = self.local_bytes.next_multiple_of(variable.align.max(8));
                symbols.insert(variable.name.clone(), Place::Local(self.local_bytes as u64));
                self.local_bytes += variable.size;
            }
        }
        let first_register = self.widths.len();
        self.widths.extend(&function.registers);
        self.instances += 1;
        let mut instance = Instance {
            function,
            first_register,
            symbols,
            prefix: self.instances,
            end,
            tables: HashMap::new(),
            depth,
        };
        for statement in &function.body {
            if let Statement::Targets(name, labels) = statement {
                let labels = labels.iter().map(|l| instance.label(l)).collect();
                instance
                    .tables
                    .insert(name.clone(), self.table_labels.len());
                self.table_labels.push(labels);
            }
        }
        for statement in &function.body {
            match statement {
                Statement::Targets(..) => {}
                Statement::Label(name) => {
                    self.labels
                        .insert(instance.label(name), self.code.len() as u32);
                }
                Statement::Instruction(raw) => self
                    .instruction(&instance, raw)
                    .map_err(|why| format!("PTX line {}: {}: {why}", raw.line, raw.opcode))?,
            }
        }
        Ok(())
    }

    fn resolve(&mut self) -> Result<(), String> {
        for (at, label) in std::mem::take(&mut self.patches) {
            let target = *self
                .labels
                .get(&label)
                .ok_or_else(|| format!("no label {label}"))?;
            self.code[at].op = Op::Branch(target);
        }
        for labels in &self.table_labels {
            let targets: Result<Vec<u32>, String> = labels
                .iter()
                .map(|l| {
                    self.labels
                        .get(l)
                        .copied()
                        .ok_or_else(|| format!("no label {l}"))
                })
                .collect();
            self.tables.push(targets?);
        }
        Ok(())
    }

    /// An operand as a value. Symbols become addresses in their state space.
    fn value(&self, instance: &Instance, operand: &Operand) -> Result<Value, String> {
        Ok(match operand {
            Operand::Register(number) => self.register(instance, *number, false),
            Operand::Not(number) => self.register(instance, *number, true),
            Operand::Integer(value) => Value::Bits(*value as u64),
            Operand::Single(bits) => Value::Bits(u64::from(*bits)),
            Operand::Double(bits) => Value::Bits(*bits),
            Operand::Special(name) => Value::Special(
                Special::named(name).ok_or_else(|| format!("unknown register {name}"))?,
            ),
            Operand::Symbol(name, offset) => {
                let (address, _) = self.symbol(instance, name)?;
                Value::Bits(address.wrapping_add_signed(*offset))
            }
            Operand::Sink => Value::Sink,
            other => return Err(format!("operand {other:?}")),
        })
    }

    fn register(&self, instance: &Instance, number: usize, negated: bool) -> Value {
        let number = instance.first_register + number;
        match self.widths[number] {
            Width::Pred => Value::Pred(number as u32, negated),
            Width::Word => Value::Word(number as u32),
            Width::Double => Value::Double(number as u32),
        }
    }

    fn symbol(&self, instance: &Instance, name: &str) -> Result<(u64, Option<Place>), String> {
        if let Some(place) = instance.symbols.get(name) {
            let (Place::Param(at) | Place::Local(at)) = *place;
            return Ok((at, Some(*place)));
        }
        self.shared
            .get(name)
            .or_else(|| self.globals.get(name))
            .map(|&at| (at, None))
            .ok_or_else(|| format!("unknown symbol {name}"))
    }

    fn values(&self, instance: &Instance, operand: &Operand) -> Result<Vec<Value>, String> {
        match operand {
            Operand::Vector(list) => list.iter().map(|o| self.value(instance, o)).collect(),
            other => Ok(vec![self.value(instance, other)?]),
        }
    }

    /// Base and offset of an address, and the place of a named parameter or local variable.
    fn address(
        &self,
        instance: &Instance,
        operand: &Operand,
    ) -> Result<(Value, i64, Option<Place>), String> {
        let Operand::Address(base, offset) = operand else {
            return Err(format!("expected an address, found {operand:?}"));
        };
        if let Operand::Symbol(name, more) = &**base {
            let (at, place) = self.symbol(instance, name)?;
            return Ok((Value::Bits(at), offset + more, place));
        }
        Ok((self.value(instance, base)?, *offset, None))
    }

    fn instruction(&mut self, instance: &Instance<'a>, raw: &Raw) -> Result<(), String> {
        let parts: Vec<&str> = raw.opcode.split('.').collect();
        let (name, suffixes) = (parts[0], Suffixes(&parts[1..]));
        let guard = raw
            .guard
            .map(|(number, negated)| ((instance.first_register + number) as u32, negated));
        let before = self.code.len();
        match name {
            "bra" => {
                let Some(Operand::Symbol(label, 0)) = raw.operands.first() else {
                    return Err("expected a label".to_owned());
                };
                self.patches.push((before, instance.label(label)));
                self.push(raw.line, guard, Op::Nothing, vec![], vec![]);
            }
            "brx" => {
                let Some(Operand::Symbol(table, 0)) = raw.operands.get(1) else {
                    return Err("expected a table".to_owned());
                };
                let table = *instance.tables.get(table).ok_or("no such table")?;
                let index = self.value(instance, &raw.operands[0])?;
                self.push(
                    raw.line,
                    guard,
                    Op::BranchTable(table as u32),
                    vec![],
                    vec![index],
                );
            }
            "ret" if instance.end.is_some() => {
                let end = instance.end.clone().unwrap_or_default();
                self.patches.push((before, end));
                self.push(raw.line, guard, Op::Nothing, vec![], vec![]);
            }
            "ret" | "exit" => self.push(raw.line, guard, Op::Exit, vec![], vec![]),
            "call" => self.call(instance, raw, guard)?,
            _ => {
                let line = Line::new(self, instance, raw, name, suffixes);
                let (op, participants, to, from) = line.decode()?;
                self.push(raw.line, guard, op, to, from);
                self.code[before].participants = participants;
            }
        }
        Ok(())
    }

    fn call(
        &mut self,
        instance: &Instance<'a>,
        raw: &Raw,
        guard: Option<(u32, bool)>,
    ) -> Result<(), String> {
        let mut lists = Vec::new();
        let mut callee = None;
        for operand in &raw.operands {
            match operand {
                Operand::List(list) => lists.push(list.as_slice()),
                Operand::Symbol(name, 0) if callee.is_none() => callee = Some((name, lists.len())),
                other => return Err(format!("call with {other:?}")),
            }
        }
        let (name, results) = callee.ok_or("no callee: indirect calls are not supported")?;
        if name == "vprintf" || name == "__assertfail" {
            self.push(
                raw.line,
                guard,
                if name == "vprintf" {
                    Op::Nothing
                } else {
                    Op::Trap
                },
                vec![],
                vec![],
            );
            return Ok(());
        }
        let source = self.source;
        let function = source
            .functions
            .iter()
            .find(|f| !f.is_entry && &f.name == name)
            .ok_or_else(|| format!("no function {name}"))?;
        let (returned, passed) = lists.split_at(results);
        let mut symbols = HashMap::new();
        let pairs = [(returned, &function.returns), (passed, &function.params)];
        for (list, variables) in pairs {
            for (operand, variable) in list.iter().copied().flatten().zip(variables) {
                let Operand::Symbol(argument, 0) = operand else {
                    return Err(format!("argument {operand:?}"));
                };
                let place = *instance
                    .symbols
                    .get(argument)
                    .ok_or_else(|| format!("no {argument}"))?;
                symbols.insert(variable.name.clone(), place);
            }
        }
        let end = format!("end of call {}", self.instances);
        if let Some((register, negated)) = guard {
            self.patches.push((self.code.len(), end.clone()));
            self.push(
                raw.line,
                Some((register, !negated)),
                Op::Nothing,
                vec![],
                vec![],
            );
        }
        self.function(function, symbols, Some(end.clone()), instance.depth + 1)?;
        self.labels.insert(end, self.code.len() as u32);
        Ok(())
    }
}

impl Instance<'_> {
    fn label(&self, name: &str) -> String {
        format!("{}:{}:{name}", self.prefix, self.function.name)
    }
}

fn symbols_of<'o>(operand: &'o Operand, names: &mut Vec<&'o str>) {
    match operand {
        Operand::Symbol(name, _) => names.push(name),
        Operand::Address(base, _) => symbols_of(base, names),
        Operand::Vector(list) | Operand::List(list) => {
            for operand in list {
                symbols_of(operand, names);
            }
        }
        _ => {}
    }
}
