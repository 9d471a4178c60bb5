//! Statements to decoded instructions; functions are inlined where they are called.

use std::collections::HashMap;
use std::sync::Arc;

use crate::code::{
    Access, Bulk, Element, Instruction, Kernel, Logic, Mbarrier, Meeting, Op, Product, Reduce,
    Shuffle, Space, Special, Update, Value, Vote,
};
use crate::lanes::{self, Suffixes, Type};
use crate::memory::SHARED_START;
use crate::parse::{self, Function, Operand, Raw, Source, Statement, Width};

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
        lines: Arc::clone(lines),
    };
    crate::registers::assign(&mut kernel, &decoder.widths);
    Ok(kernel)
}

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
    /// The label behind a call; `None` in an entry.
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
            meeting: Meeting::None,
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
                let (op, meeting, to, from) = self.simple(instance, raw, name, suffixes)?;
                self.push(raw.line, guard, op, to, from);
                self.code[before].meeting = meeting;
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

    #[allow(clippy::type_complexity)]
    fn simple(
        &self,
        instance: &Instance,
        raw: &Raw,
        name: &str,
        s: Suffixes,
    ) -> Result<(Op, Meeting, Vec<Value>, Vec<Value>), String> {
        let operands = &raw.operands;
        let unknown = || Err("unknown instruction".to_owned());
        let value = |i: usize| match operands.get(i) {
            Some(operand) => self.value(instance, operand),
            None => Err(format!("operand {i} is missing")),
        };
        let all = |first: usize| -> Result<Vec<Value>, String> {
            let mut list = Vec::new();
            for operand in operands.iter().skip(first) {
                list.extend(self.values(instance, operand)?);
            }
            Ok(list)
        };
        let ty = s.0.iter().rev().find_map(|name| Type::named(name));
        let none = Meeting::None;
        Ok(match name {
            "ld" | "ldu" => {
                let (access, base) = self.access(instance, &operands[1], s)?;
                (
                    Op::Load(access),
                    none,
                    self.values(instance, &operands[0])?,
                    vec![base],
                )
            }
            "st" if s.has("async") => {
                let (base, offset, _) = self.address(instance, &operands[0])?;
                let (barrier, _, _) = self.address(instance, &operands[2])?;
                let mut from = vec![base, barrier];
                from.extend(self.values(instance, &operands[1])?);
                let count = (from.len() - 2) as u8;
                (
                    Op::StoreAsync(ty.ok_or("no type")?, count, offset),
                    none,
                    vec![],
                    from,
                )
            }
            "st" => {
                let (access, base) = self.access(instance, &operands[0], s)?;
                let mut from = vec![base];
                from.extend(self.values(instance, &operands[1])?);
                (Op::Store(access), none, vec![], from)
            }
            "atom" | "red" if !s.has("async") => {
                let at = usize::from(name == "atom");
                let (mut access, base) = self.access(instance, &operands[at], s)?;
                access.count = 1;
                let update = match () {
                    () if s.has("add") => Update::Add,
                    () if s.has("min") => Update::Min,
                    () if s.has("max") => Update::Max,
                    () if s.has("and") => Update::And,
                    () if s.has("or") => Update::Or,
                    () if s.has("xor") => Update::Xor,
                    () if s.has("exch") => Update::Exchange,
                    () if s.has("cas") => Update::Compare,
                    () if s.has("inc") => Update::Increment,
                    () if s.has("dec") => Update::Decrement,
                    () => return unknown(),
                };
                let mut from = vec![base];
                from.extend(all(at + 1)?);
                let to = if at == 1 { vec![value(0)?] } else { vec![] };
                (Op::Atomic(access, update), none, to, from)
            }
            "mov" if ty == Some(Type::Pred) => {
                (Op::Logic(Logic::Move), none, vec![value(0)?], all(1)?)
            }
            "mov" => match (&operands[0], &operands[1]) {
                (Operand::Vector(list), from) => {
                    let bytes = ty.ok_or("no type")?.bytes() / list.len();
                    (
                        Op::Unpack(bytes as u8),
                        none,
                        self.values(instance, &operands[0])?,
                        self.values(instance, from)?,
                    )
                }
                (_, Operand::Vector(list)) => {
                    let bytes = ty.ok_or("no type")?.bytes() / list.len();
                    (Op::Pack(bytes as u8), none, vec![value(0)?], all(1)?)
                }
                _ => (Op::Move, none, vec![value(0)?], all(1)?),
            },
            "cvta" => {
                let space = if s.has("shared") || s.has("shared::cta") {
                    Space::Shared
                } else if s.has("local") {
                    Space::Local
                } else if s.has("param") {
                    Space::Param
                } else {
                    Space::Global
                };
                let op = if s.has("to") {
                    Op::FromGeneric(space)
                } else {
                    Op::ToGeneric(space)
                };
                (op, none, vec![value(0)?], vec![value(1)?])
            }
            "isspacep" => {
                let space = match s.0.first() {
                    Some(&"shared" | &"shared::cta") => Space::Shared,
                    Some(&"shared::cluster") => Space::Cluster,
                    Some(&"local") => Space::Local,
                    _ => Space::Global,
                };
                (Op::IsSpace(space), none, vec![value(0)?], vec![value(1)?])
            }
            "setp" => {
                let how = s.0[0];
                let ty = ty.ok_or("no type")?;
                let lanes = lanes::comparison(how, ty).ok_or("unknown comparison")?;
                let combine = s.0[1..].iter().find_map(|name| match *name {
                    "and" => Some(Logic::And),
                    "or" => Some(Logic::Or),
                    "xor" => Some(Logic::Xor),
                    _ => None,
                });
                if matches!(ty, Type::F16x2 | Type::BF16x2) {
                    return unknown();
                }
                let to = match &operands[0] {
                    Operand::Pair(p, q) => vec![self.value(instance, p)?, self.value(instance, q)?],
                    other => vec![self.value(instance, other)?],
                };
                (Op::Compare(lanes, combine), none, to, all(1)?)
            }
            "selp" => (Op::Select, none, vec![value(0)?], all(1)?),
            "and" | "or" | "xor" | "not" if ty == Some(Type::Pred) => {
                let logic = match name {
                    "and" => Logic::And,
                    "or" => Logic::Or,
                    "xor" => Logic::Xor,
                    _ => Logic::Not,
                };
                (Op::Logic(logic), none, vec![value(0)?], all(1)?)
            }
            "add" | "sub" | "addc" | "subc" | "mad" | "madc"
                if name.ends_with('c') || s.has("cc") =>
            {
                if name.starts_with("mad") {
                    return unknown();
                }
                let op = Op::Carry {
                    subtract: name.starts_with("sub"),
                    takes: name.ends_with('c'),
                    sets: s.has("cc"),
                    double: ty.is_some_and(|t| t.bytes() == 8),
                };
                (op, none, vec![value(0)?], all(1)?)
            }
            "cvt" => (
                self.conversion(operands, s)?,
                none,
                vec![value(0)?],
                all(1)?,
            ),
            "shfl" => {
                let mode = match () {
                    () if s.has("up") => Shuffle::Up,
                    () if s.has("down") => Shuffle::Down,
                    () if s.has("bfly") => Shuffle::Butterfly,
                    () => Shuffle::Index,
                };
                let to = match &operands[0] {
                    Operand::Pair(d, p) => vec![self.value(instance, d)?, self.value(instance, p)?],
                    other => vec![self.value(instance, other)?],
                };
                (Op::Shuffle(mode), Meeting::Mask(3), to, all(1)?)
            }
            "vote" => {
                let vote = match () {
                    () if s.has("ballot") => Vote::Ballot,
                    () if s.has("all") => Vote::All,
                    () if s.has("any") => Vote::Any,
                    () => Vote::Uniform,
                };
                (Op::Vote(vote), Meeting::Mask(1), vec![value(0)?], all(1)?)
            }
            "match" => {
                let to = match &operands[0] {
                    Operand::Pair(d, p) => vec![self.value(instance, d)?, self.value(instance, p)?],
                    other => vec![self.value(instance, other)?],
                };
                let op = Op::Match {
                    all: s.has("all"),
                    double: ty == Some(Type::B64),
                };
                (op, Meeting::Mask(1), to, all(1)?)
            }
            "redux" => {
                let update = match () {
                    () if s.has("add") => Update::Add,
                    () if s.has("min") => Update::Min,
                    () if s.has("max") => Update::Max,
                    () if s.has("and") => Update::And,
                    () if s.has("or") => Update::Or,
                    () => Update::Xor,
                };
                (
                    Op::Redux(update, ty.ok_or("no type")?),
                    Meeting::Mask(1),
                    vec![value(0)?],
                    all(1)?,
                )
            }
            "activemask" => (Op::ActiveMask, none, vec![value(0)?], vec![]),
            "elect" => {
                let to = match &operands[0] {
                    Operand::Pair(d, p) => vec![self.value(instance, d)?, self.value(instance, p)?],
                    other => return Err(format!("elect to {other:?}")),
                };
                (Op::Elect, Meeting::Mask(0), to, all(1)?)
            }
            "bar" | "barrier" if s.has("warp") => {
                (Op::WarpBarrier, Meeting::Mask(0), vec![], all(0)?)
            }
            "barrier" if s.has("cluster") => {
                let op = if s.has("arrive") {
                    Op::ClusterArrive
                } else {
                    Op::ClusterWait
                };
                (
                    op,
                    if s.has("aligned") {
                        Meeting::Warp
                    } else {
                        none
                    },
                    vec![],
                    vec![],
                )
            }
            "bar" | "barrier" => {
                let aligned = name == "bar" || s.has("aligned");
                let meeting = if aligned { Meeting::Warp } else { none };
                if s.has("red") {
                    let reduce = match () {
                        () if s.has("popc") => Reduce::Count,
                        () if s.has("and") => Reduce::And,
                        () => Reduce::Or,
                    };
                    let rest = all(1)?;
                    let counted = rest.len() == 3;
                    return Ok((
                        Op::Barrier {
                            waits: true,
                            reduce,
                            counted,
                        },
                        meeting,
                        vec![value(0)?],
                        rest,
                    ));
                }
                let from = all(0)?;
                let counted = from.len() == 2;
                let op = Op::Barrier {
                    waits: !s.has("arrive"),
                    reduce: Reduce::None,
                    counted,
                };
                (op, meeting, vec![], from)
            }
            "ldmatrix" | "stmatrix" => {
                let count = match () {
                    () if s.has("x4") => 4,
                    () if s.has("x2") => 2,
                    () => 1,
                };
                if !s.has("m8n8") || !s.has("b16") {
                    return unknown();
                }
                let transposed = s.has("trans");
                let loads = name == "ldmatrix";
                let (base, offset, _) = self.address(instance, &operands[usize::from(loads)])?;
                let registers = self.values(instance, &operands[usize::from(!loads)])?;
                if loads {
                    (
                        Op::LoadMatrix {
                            count,
                            transposed,
                            offset,
                        },
                        Meeting::Warp,
                        registers,
                        vec![base],
                    )
                } else {
                    let mut from = vec![base];
                    from.extend(registers);
                    (
                        Op::StoreMatrix {
                            count,
                            transposed,
                            offset,
                        },
                        Meeting::Warp,
                        vec![],
                        from,
                    )
                }
            }
            "movmatrix" => (Op::MoveMatrix, Meeting::Warp, vec![value(0)?], all(1)?),
            "mma" => (
                Op::Product(product(s)?),
                Meeting::Warp,
                self.values(instance, &operands[0])?,
                all(1)?,
            ),
            "cp" => return self.copy(instance, operands, s),
            "mbarrier" => return self.mbarrier(instance, operands, s),
            "mapa" => {
                let generic = !s.has("shared::cluster");
                (Op::MapShared { generic }, none, vec![value(0)?], all(1)?)
            }
            "getctarank" => {
                let generic = !s.has("shared::cluster");
                (Op::Rank { generic }, none, vec![value(0)?], all(1)?)
            }
            "wgmma" => return self.warpgroup(instance, operands, s),
            "nanosleep" => (Op::Yield, none, vec![], vec![]),
            "griddepcontrol" => (
                if s.has("wait") {
                    Op::GridWait
                } else {
                    Op::Nothing
                },
                none,
                vec![],
                vec![],
            ),
            "membar" | "fence" | "prefetch" | "prefetchu" | "applypriority" | "discard"
            | "setmaxnreg" | "pmevent" => (Op::Nothing, none, vec![], vec![]),
            "createpolicy" => (Op::Move, none, vec![value(0)?], vec![Value::Bits(0)]),
            "trap" | "brkpt" => (Op::Trap, none, vec![], vec![]),
            _ => {
                let ty = ty.ok_or("unknown instruction")?;
                let Some(lanes) = lanes::arithmetic(name, s, ty) else {
                    return unknown();
                };
                (Op::Lanes(lanes), none, vec![value(0)?], all(1)?)
            }
        })
    }

    /// An access by the suffixes of its instruction.
    fn access(
        &self,
        instance: &Instance,
        address: &Operand,
        s: Suffixes,
    ) -> Result<(Access, Value), String> {
        let (base, offset, place) = self.address(instance, address)?;
        let mut space = Space::Generic;
        let (mut count, mut ty) = (1, None);
        for suffix in s.0 {
            match *suffix {
                "global" | "const" => space = Space::Global,
                "shared" | "shared::cta" => space = Space::Shared,
                "shared::cluster" => space = Space::Cluster,
                "local" => space = Space::Local,
                "param" | "param::entry" | "param::func" => {
                    space = if instance.end.is_some() {
                        Space::Local
                    } else {
                        Space::Param
                    };
                }
                "v2" => count = 2,
                "v4" => count = 4,
                "v8" => count = 8,
                other => match Type::named(other) {
                    Some(found) => ty = Some(found),
                    None if KNOWN_HINTS.contains(&other)
                        || other.starts_with("L1::")
                        || other.starts_with("L2::") => {}
                    None => return Err(format!("unknown suffix .{other}")),
                },
            }
        }
        if space == Space::Param
            && let Some(place) = place
        {
            space = match place {
                Place::Param(_) => Space::Param,
                Place::Local(_) => Space::Local,
            };
        }
        let ty = ty.ok_or("no type")?;
        Ok((
            Access {
                space,
                ty,
                count,
                offset,
            },
            base,
        ))
    }

    fn conversion(&self, operands: &[Operand], s: Suffixes) -> Result<Op, String> {
        let types: Vec<&str> = s
            .0
            .iter()
            .copied()
            .filter(|name| Type::named(name).is_some() || name.ends_with("x2") || *name == "tf32")
            .collect();
        let &[to, from] = types.as_slice() else {
            return Err(format!("conversion between {types:?}"));
        };
        let found = if operands.len() == 3 {
            lanes::pair_conversion(s, to)
        } else if to.ends_with("x2") || from.ends_with("x2") {
            lanes::eight_bit_conversion(to, from)
        } else if to == "tf32" {
            Some(crate::product::to_tf32())
        } else {
            match (Type::named(to), Type::named(from)) {
                (Some(to), Some(from)) => lanes::conversion(s, to, from),
                _ => None,
            }
        };
        found
            .map(Op::Lanes)
            .ok_or_else(|| "unknown conversion".to_owned())
    }

    #[allow(clippy::type_complexity)]
    fn copy(
        &self,
        instance: &Instance,
        operands: &[Operand],
        s: Suffixes,
    ) -> Result<(Op, Meeting, Vec<Value>, Vec<Value>), String> {
        let none = Meeting::None;
        if s.0.first() == Some(&"reduce") || s.has("bulk") {
            return self.bulk(instance, operands, s);
        }
        if s.has("commit_group") {
            return Ok((Op::CommitCopies, none, vec![], vec![]));
        }
        if s.has("wait_group") {
            let pending = self.value(instance, &operands[0])?;
            return Ok((Op::WaitCopies, none, vec![], vec![pending]));
        }
        if s.has("wait_all") {
            return Ok((Op::WaitAllCopies, none, vec![], vec![]));
        }
        if s.has("mbarrier") {
            let (base, offset, _) = self.address(instance, &operands[0])?;
            let op = Op::Mbarrier(
                Mbarrier::ArriveCopies {
                    counted: !s.has("noinc"),
                },
                offset,
            );
            return Ok((op, none, vec![], vec![base]));
        }
        let (target, to_offset, _) = self.address(instance, &operands[0])?;
        let (source, from_offset, _) = self.address(instance, &operands[1])?;
        let Some(Operand::Integer(bytes)) = operands.get(2) else {
            return Err("a copy's size is no constant".to_owned());
        };
        let mut from = vec![target, source];
        // A policy of the cache is the last operand; the number of bytes to read precedes it.
        let rest = &operands[3..];
        let hints = usize::from(s.has("L2::cache_hint"));
        let sized = rest.len() > hints;
        if sized {
            from.push(self.value(instance, &rest[0])?);
        }
        let op = Op::Copy {
            bytes: *bytes as u8,
            sized,
            offsets: (to_offset as i32, from_offset as i32),
        };
        Ok((op, none, vec![], from))
    }

    #[allow(clippy::type_complexity)]
    fn bulk(
        &self,
        instance: &Instance,
        operands: &[Operand],
        s: Suffixes,
    ) -> Result<(Op, Meeting, Vec<Value>, Vec<Value>), String> {
        let none = Meeting::None;
        if s.has("commit_group") {
            return Ok((Op::Bulk(Bulk::Commit, 0, 0), none, vec![], vec![]));
        }
        if s.has("wait_group") {
            let pending = self.value(instance, &operands[0])?;
            return Ok((
                Op::Bulk(
                    Bulk::Wait {
                        reads: s.has("read"),
                    },
                    0,
                    0,
                ),
                none,
                vec![],
                vec![pending],
            ));
        }
        if s.has("prefetch") {
            return Ok((Op::Nothing, none, vec![], vec![]));
        }
        if s.has("tensor") {
            return Err("unknown instruction".to_owned());
        }
        let (target, to_offset, _) = self.address(instance, &operands[0])?;
        let (source, from_offset, _) = self.address(instance, &operands[1])?;
        let size = self.value(instance, &operands[2])?;
        let mut from = vec![target, source, size];
        let spaces: Vec<&str> =
            s.0.iter()
                .copied()
                .filter(|n| n.starts_with("shared") || *n == "global")
                .collect();
        let kind = match spaces.as_slice() {
            ["shared::cluster" | "shared::cta", "global"] => {
                from.push(self.address(instance, &operands[3])?.0);
                let multicast = s.has("multicast::cluster");
                if multicast {
                    from.push(self.value(instance, &operands[4])?);
                }
                Bulk::Load { multicast }
            }
            ["shared::cluster", "shared::cta"] => {
                from.push(self.address(instance, &operands[3])?.0);
                Bulk::ToCluster
            }
            ["global", "shared::cta"] if s.0.first() == Some(&"reduce") => {
                let ty =
                    s.0.iter()
                        .rev()
                        .find_map(|name| Type::named(name))
                        .ok_or("no type")?;
                Bulk::ReduceAdd(ty)
            }
            ["global", "shared::cta"] => Bulk::Store,
            _ => return Err("unknown instruction".to_owned()),
        };
        Ok((Op::Bulk(kind, to_offset, from_offset), none, vec![], from))
    }

    #[allow(clippy::type_complexity)]
    fn mbarrier(
        &self,
        instance: &Instance,
        operands: &[Operand],
        s: Suffixes,
    ) -> Result<(Op, Meeting, Vec<Value>, Vec<Value>), String> {
        let at = operands
            .iter()
            .position(|o| matches!(o, Operand::Address(..)))
            .ok_or("no address")?;
        let (base, offset, _) = self.address(instance, &operands[at])?;
        let mut from = vec![base];
        for operand in &operands[at + 1..] {
            from.push(self.value(instance, operand)?);
        }
        let mut to = Vec::new();
        for operand in &operands[..at] {
            to.push(self.value(instance, operand)?);
        }
        let kind = match s.0[0] {
            "init" => Mbarrier::Init,
            "inval" => Mbarrier::Invalidate,
            "arrive" => Mbarrier::Arrive {
                expects: s.has("expect_tx"),
                drops: false,
            },
            "arrive_drop" => Mbarrier::Arrive {
                expects: s.has("expect_tx"),
                drops: true,
            },
            "expect_tx" => Mbarrier::ExpectBytes,
            "complete_tx" => Mbarrier::Complete,
            "test_wait" | "try_wait" => Mbarrier::Test {
                parity: s.has("parity"),
            },
            _ => return Err("unknown instruction".to_owned()),
        };
        Ok((Op::Mbarrier(kind, offset), Meeting::None, to, from))
    }

    #[allow(clippy::type_complexity)]
    fn warpgroup(
        &self,
        instance: &Instance,
        operands: &[Operand],
        s: Suffixes,
    ) -> Result<(Op, Meeting, Vec<Value>, Vec<Value>), String> {
        let meeting = Meeting::Warp;
        if s.has("fence") || s.has("commit_group") {
            return Ok((Op::Nothing, meeting, vec![], vec![]));
        }
        if s.has("wait_group") {
            return Ok((Op::WarpgroupWait, meeting, vec![], vec![]));
        }
        if !s.has("mma_async") {
            return Err("unknown instruction".to_owned());
        }
        let shape = product(s)?;
        let sums = self.values(instance, &operands[0])?;
        let mut from = sums.clone();
        for operand in &operands[1..] {
            from.extend(self.values(instance, operand)?);
        }
        let a_in_registers = matches!(operands[1], Operand::Vector(_));
        // Behind scale-d, the signs of A and B; halves then say whether A and B are transposed.
        Ok((
            Op::WarpgroupProduct(shape, a_in_registers, false),
            meeting,
            sums,
            from,
        ))
    }
}

/// Suffixes of accesses that change nothing here: caches, ordering and scopes.
const KNOWN_HINTS: &[&str] = &[
    "volatile", "relaxed", "acquire", "release", "acq_rel", "weak", "mmio", "cta", "cluster",
    "gpu", "sys", "ca", "cg", "cs", "cv", "lu", "wb", "wt", "nc", "add", "min", "max", "and", "or",
    "xor", "exch", "cas", "inc", "dec", "noftz", "unified",
];

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

/// Shape and types of `mma` or `wgmma`.
fn product(s: Suffixes) -> Result<Product, String> {
    let shape = s
        .0
        .iter()
        .find(|name| {
            name.starts_with('m') && name.contains('n') && name.contains('k') && !name.contains('_')
        })
        .ok_or("no shape")?;
    let (_, rest) = shape.split_once('n').ok_or("no shape")?;
    let (n, k) = rest.split_once('k').ok_or("no shape")?;
    let number = |text: &str| text.parse::<usize>().map_err(|_| format!("shape {shape}"));
    let element = |name: &str| {
        Some(match name {
            "f16" => Element::F16,
            "bf16" => Element::BF16,
            "tf32" => Element::Tf32,
            "f32" => Element::F32,
            "s8" => Element::S8,
            "u8" => Element::U8,
            "s32" => Element::S32,
            "e4m3" => Element::E4m3,
            "e5m2" => Element::E5m2,
            _ => return None,
        })
    };
    let types: Vec<Element> = s.0.iter().filter_map(|name| element(name)).collect();
    if types.len() < 3 || (s.has("sync") && !(s.has("row") && s.has("col")) && !s.has("mma_async"))
    {
        return Err("unknown form of a matrix multiplication".to_owned());
    }
    Ok(Product {
        n: number(n)?,
        k: number(k)?,
        result: types[0],
        a: types[1],
        b: types[2],
        saturate: s.has("satfinite"),
    })
}
