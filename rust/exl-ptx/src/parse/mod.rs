//! Text of PTX to statements: functions, variables, registers with their scopes, instructions with their operands.

mod tokens;

use std::collections::HashMap;

use tokens::{Token, Tokens, tokens};

/// A module as written.
#[derive(Debug, Default)]
pub struct Source {
    pub variables: Vec<Variable>,
    pub functions: Vec<Function>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    Shared,
    Global,
    Const,
    Local,
    Param,
}

/// A variable of a state space.
#[derive(Clone, Debug)]
pub struct Variable {
    pub space: Space,
    pub name: String,
    pub align: usize,
    /// Bytes; 0 for `extern` arrays without a size.
    pub size: usize,
    /// Initial bytes, shorter than `size` if the rest is zero.
    pub bytes: Vec<u8>,
    pub is_extern: bool,
}

/// An entry or a function.
#[derive(Debug, Default)]
pub struct Function {
    pub name: String,
    pub is_entry: bool,
    pub params: Vec<Variable>,
    pub returns: Vec<Variable>,
    /// Declared widths of the virtual registers.
    pub registers: Vec<Width>,
    pub variables: Vec<Variable>,
    pub body: Vec<Statement>,
    /// `.minnctapersm`, if stated.
    pub min_blocks: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    Pred,
    /// Registers of 8, 16 and 32 bits.
    Word,
    Double,
}

#[derive(Clone, Debug)]
pub enum Statement {
    Label(String),
    Targets(String, Vec<String>),
    Instruction(Raw),
}

/// An instruction before it is decoded.
#[derive(Clone, Debug)]
pub struct Raw {
    pub line: u32,
    /// Guard: register and whether it is negated.
    pub guard: Option<(usize, bool)>,
    pub opcode: String,
    pub operands: Vec<Operand>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Operand {
    Register(usize),
    /// `!p`
    Not(usize),
    /// `p|q`
    Pair(Box<Operand>, Box<Operand>),
    Integer(i128),
    Single(u32),
    Double(u64),
    /// A special register such as `%tid.x`, with its `%`.
    Special(String),
    /// A label, variable or function, plus a constant.
    Symbol(String, i64),
    /// `[base + offset]`
    Address(Box<Operand>, i64),
    Vector(Vec<Operand>),
    List(Vec<Operand>),
    /// `_`
    Sink,
}

/// Parse a module.
pub fn parse(text: &str) -> Result<Source, String> {
    let mut tokens = tokens(text.trim_end_matches('\0'))?;
    let mut source = Source::default();
    while tokens.peek().is_some() {
        let line = tokens.line();
        top_level(&mut tokens, &mut source).map_err(|why| {
            format!(
                "PTX line {}: {why} (statement of line {line})",
                tokens.line()
            )
        })?;
    }
    Ok(source)
}

fn top_level(tokens: &mut Tokens, source: &mut Source) -> Result<(), String> {
    let mut is_extern = false;
    loop {
        let word = match tokens.next()? {
            Token::Word(word) => word,
            Token::Mark(';') => return Ok(()),
            other => return Err(format!("unexpected {other:?}")),
        };
        match word {
            ".version" | ".target" | ".address_size" => {
                tokens.next()?;
                while tokens.take(',') {
                    tokens.next()?;
                }
                return Ok(());
            }
            ".visible" | ".weak" | ".common" => {}
            ".extern" => is_extern = true,
            ".shared" | ".global" | ".const" => {
                let variable = variable(tokens, space_of(word), is_extern)?;
                if !(is_extern && source.variables.iter().any(|v| v.name == variable.name)) {
                    source.variables.push(variable);
                }
                tokens.expect(';')?;
                return Ok(());
            }
            ".entry" | ".func" => {
                if let Some(function) = function(tokens, word == ".entry")? {
                    source.functions.push(function);
                }
                return Ok(());
            }
            ".file" => {
                tokens.next()?;
                tokens.next()?;
                return Ok(());
            }
            ".section" => {
                tokens.skip_to('}')?;
                return Ok(());
            }
            other => return Err(format!("unknown directive {other}")),
        }
    }
}

fn space_of(word: &str) -> Space {
    match word {
        ".shared" => Space::Shared,
        ".global" => Space::Global,
        ".const" => Space::Const,
        ".local" => Space::Local,
        _ => Space::Param,
    }
}

fn type_bytes(word: &str) -> Option<usize> {
    Some(match word {
        ".b8" | ".u8" | ".s8" => 1,
        ".b16" | ".u16" | ".s16" | ".f16" | ".bf16" => 2,
        ".b32" | ".u32" | ".s32" | ".f32" | ".f16x2" | ".bf16x2" => 4,
        ".b64" | ".u64" | ".s64" | ".f64" => 8,
        ".b128" => 16,
        _ => return None,
    })
}

/// The rest of a variable's declaration, up to its `;`, `,` or `)`.
fn variable(tokens: &mut Tokens, space: Space, is_extern: bool) -> Result<Variable, String> {
    let (mut align, mut element, mut float) = (None, 1, false);
    let name = loop {
        let word = tokens.word()?;
        if word == ".align" {
            align = Some(integer_of(tokens.word()?)? as usize);
        } else if word == ".ptr" || word == ".attribute" || word == ".managed" {
            // `.ptr .global .align 1`: facts about a pointer's target.
            while let Some(next) = tokens.peek_word() {
                if next == ".align" {
                    tokens.next()?;
                    tokens.next()?;
                } else if next.starts_with('.') {
                    tokens.next()?;
                } else {
                    break;
                }
            }
        } else if let Some(bytes) = type_bytes(word) {
            element = bytes;
            float = word.starts_with(".f");
        } else if word.starts_with('.') {
            return Err(format!("unknown property {word} of a variable"));
        } else {
            break word.to_owned();
        }
    };
    let mut count = 1;
    while tokens.take('[') {
        if tokens.take(']') {
            count = 0;
        } else {
            count *= integer_of(tokens.word()?)? as usize;
            tokens.expect(']')?;
        }
    }
    let mut bytes = Vec::new();
    if tokens.take('=') {
        let mut depth = 0;
        loop {
            if tokens.take('{') {
                depth += 1;
            } else if tokens.take('}') {
                depth -= 1;
            } else if !tokens.take(',') {
                let negative = tokens.take('-');
                let word = tokens.word()?;
                let value = match number(word)? {
                    Operand::Integer(value) if float => {
                        let value = value as f64;
                        if element == 4 {
                            i128::from((value as f32).to_bits())
                        } else {
                            i128::from(value.to_bits())
                        }
                    }
                    Operand::Integer(value) => value,
                    Operand::Single(bits) => i128::from(bits),
                    Operand::Double(bits) => i128::from(bits),
                    other => return Err(format!("initial value {other:?} of {name}")),
                };
                let value = if negative { -value } else { value };
                bytes.extend_from_slice(&value.to_le_bytes()[..element]);
            }
            if depth == 0 {
                break;
            }
        }
        if count == 0 {
            count = bytes.len() / element;
        }
    }
    Ok(Variable {
        space,
        name,
        align: align.unwrap_or(element),
        size: count * element,
        bytes,
        is_extern,
    })
}

fn variables(tokens: &mut Tokens) -> Result<Vec<Variable>, String> {
    let mut list = Vec::new();
    tokens.expect('(')?;
    while !tokens.take(')') {
        let word = tokens.word()?;
        if word != ".param" && word != ".reg" {
            return Err(format!("expected .param, found {word}"));
        }
        list.push(variable(tokens, Space::Param, false)?);
        tokens.take(',');
    }
    Ok(list)
}

/// A function after `.entry` or `.func`; `None` for a declaration without a body.
fn function(tokens: &mut Tokens, is_entry: bool) -> Result<Option<Function>, String> {
    let mut made = Function {
        is_entry,
        ..Function::default()
    };
    if tokens.is('(') {
        made.returns = variables(tokens)?;
    }
    tokens.word()?.clone_into(&mut made.name);
    if tokens.is('(') {
        made.params = variables(tokens)?;
    }
    loop {
        match tokens.next()? {
            Token::Mark(';') => return Ok(None),
            Token::Mark('{') => break,
            Token::Word(".minnctapersm") => {
                made.min_blocks = Some(integer_of(tokens.word()?)? as usize);
            }
            Token::Word(".pragma") => tokens.skip_to(';')?,
            _ => {}
        }
    }
    let mut body = Body {
        scopes: vec![HashMap::new()],
        made,
    };
    while !body.scopes.is_empty() {
        body.statement(tokens)?;
    }
    Ok(Some(body.made))
}

/// The registers in scope while the body of a function is read.
struct Body {
    scopes: Vec<HashMap<String, usize>>,
    made: Function,
}

impl Body {
    fn register(&self, name: &str) -> Option<usize> {
        self.scopes.iter().rev().find_map(|s| s.get(name)).copied()
    }

    fn declare(&mut self, name: String, width: Width) {
        let number = self.made.registers.len();
        self.made.registers.push(width);
        self.scopes
            .last_mut()
            .expect("a body has a scope")
            .insert(name, number);
    }

    fn statement(&mut self, tokens: &mut Tokens) -> Result<(), String> {
        let line = tokens.line();
        match tokens.next()? {
            Token::Mark('{') => self.scopes.push(HashMap::new()),
            Token::Mark('}') => {
                self.scopes.pop();
            }
            Token::Mark(';') => {}
            Token::Mark('@') => {
                let negated = tokens.take('!');
                let name = tokens.word()?;
                let guard = self
                    .register(name)
                    .ok_or_else(|| format!("no register {name}"))?;
                let opcode = tokens.word()?;
                self.instruction(tokens, line, Some((guard, negated)), opcode)?;
            }
            Token::Word(".reg") => self.registers(tokens)?,
            Token::Word(word @ (".shared" | ".local" | ".param" | ".global" | ".const")) => {
                let variable = variable(tokens, space_of(word), false)?;
                self.made.variables.push(variable);
                tokens.expect(';')?;
            }
            Token::Word(".pragma") => tokens.skip_to(';')?,
            Token::Word(".loc") => {
                while tokens.line() == line && tokens.peek().is_some() {
                    tokens.next()?;
                }
            }
            Token::Word(word) if tokens.take(':') => {
                if tokens.peek_word() == Some(".branchtargets") {
                    tokens.next()?;
                    let mut labels = Vec::new();
                    while !tokens.take(';') {
                        labels.push(tokens.word()?.to_owned());
                        tokens.take(',');
                    }
                    self.made
                        .body
                        .push(Statement::Targets(word.to_owned(), labels));
                } else if tokens.peek_word() == Some(".callprototype") {
                    tokens.skip_to(';')?;
                } else {
                    self.made.body.push(Statement::Label(word.to_owned()));
                }
            }
            Token::Word(word) => self.instruction(tokens, line, None, word)?,
            other => return Err(format!("unexpected {other:?}")),
        }
        Ok(())
    }

    /// `.reg .b32 %r<10>;` or `.reg .f16 low, high;`
    fn registers(&mut self, tokens: &mut Tokens) -> Result<(), String> {
        let kind = tokens.word()?;
        let width = match kind {
            ".pred" => Width::Pred,
            _ => match type_bytes(kind) {
                Some(1..=4) => Width::Word,
                Some(8) => Width::Double,
                _ => return Err(format!("registers of type {kind}")),
            },
        };
        loop {
            let name = tokens.word()?;
            if tokens.take('<') {
                let count = integer_of(tokens.word()?)?;
                tokens.expect('>')?;
                for i in 0..count {
                    self.declare(format!("{name}{i}"), width);
                }
            } else {
                self.declare(name.to_owned(), width);
            }
            if !tokens.take(',') {
                return tokens.expect(';');
            }
        }
    }

    fn instruction(
        &mut self,
        tokens: &mut Tokens,
        line: u32,
        guard: Option<(usize, bool)>,
        opcode: &str,
    ) -> Result<(), String> {
        let mut operands = Vec::new();
        while !tokens.take(';') {
            operands.push(self.operand(tokens)?);
            tokens.take(',');
        }
        self.made.body.push(Statement::Instruction(Raw {
            line,
            guard,
            opcode: opcode.to_owned(),
            operands,
        }));
        Ok(())
    }

    fn operand(&self, tokens: &mut Tokens) -> Result<Operand, String> {
        let sequence = |tokens: &mut Tokens, end| {
            let mut list = Vec::new();
            while !tokens.take(end) {
                list.push(self.operand(tokens)?);
                tokens.take(',');
            }
            Ok::<_, String>(list)
        };
        let first = match tokens.next()? {
            Token::Mark('{') => return Ok(Operand::Vector(sequence(tokens, '}')?)),
            Token::Mark('(') => return Ok(Operand::List(sequence(tokens, ')')?)),
            Token::Mark('[') => {
                let base = self.operand(tokens)?;
                let offset = if tokens.take('+') { signed(tokens)? } else { 0 };
                tokens.expect(']')?;
                return Ok(match base {
                    Operand::Symbol(name, more) => {
                        Operand::Address(Box::new(Operand::Symbol(name, 0)), more + offset)
                    }
                    base => Operand::Address(Box::new(base), offset),
                });
            }
            Token::Mark('-') => {
                return Ok(match number(tokens.word()?)? {
                    Operand::Integer(value) => Operand::Integer(-value),
                    Operand::Single(bits) => Operand::Single(bits ^ (1 << 31)),
                    Operand::Double(bits) => Operand::Double(bits ^ (1 << 63)),
                    other => other,
                });
            }
            Token::Mark('!') => {
                let name = tokens.word()?;
                let register = self
                    .register(name)
                    .ok_or_else(|| format!("no register {name}"))?;
                return Ok(Operand::Not(register));
            }
            Token::Word("_") => Operand::Sink,
            Token::Word(word) => self.word(word)?,
            other => return Err(format!("unexpected {other:?} in an operand")),
        };
        if tokens.take('|') {
            let second = self.operand(tokens)?;
            return Ok(Operand::Pair(Box::new(first), Box::new(second)));
        }
        if let Operand::Symbol(name, 0) = &first
            && tokens.take('+')
        {
            return Ok(Operand::Symbol(name.clone(), signed(tokens)?));
        }
        Ok(first)
    }

    fn word(&self, word: &str) -> Result<Operand, String> {
        if let Some(register) = self.register(word) {
            return Ok(Operand::Register(register));
        }
        if word.starts_with('%') {
            return Ok(Operand::Special(word.to_owned()));
        }
        if word.as_bytes()[0].is_ascii_digit() {
            return number(word);
        }
        if word == "WARP_SZ" {
            return Ok(Operand::Integer(32));
        }
        Ok(Operand::Symbol(word.to_owned(), 0))
    }
}

fn signed(tokens: &mut Tokens) -> Result<i64, String> {
    let negative = tokens.take('-');
    let value = integer_of(tokens.word()?)? as i64;
    Ok(if negative { -value } else { value })
}

fn number(word: &str) -> Result<Operand, String> {
    let hex = |digits: &str| u64::from_str_radix(digits, 16).map_err(|e| format!("{word}: {e}"));
    if word.len() == 10 && (word.starts_with("0f") || word.starts_with("0F")) {
        return Ok(Operand::Single(hex(&word[2..])? as u32));
    }
    if word.len() == 18 && (word.starts_with("0d") || word.starts_with("0D")) {
        return Ok(Operand::Double(hex(&word[2..])?));
    }
    if word.contains('.') {
        let value: f64 = word.parse().map_err(|e| format!("{word}: {e}"))?;
        return Ok(Operand::Double(value.to_bits()));
    }
    integer_of(word).map(Operand::Integer)
}

fn integer_of(word: &str) -> Result<i128, String> {
    let plain = word.trim_end_matches('U');
    match plain
        .strip_prefix("0x")
        .or_else(|| plain.strip_prefix("0X"))
    {
        Some(digits) => i128::from_str_radix(digits, 16),
        None => plain.parse(),
    }
    .map_err(|_| format!("{word} is no number"))
}
