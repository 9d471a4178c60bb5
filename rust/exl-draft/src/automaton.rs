//! A suffix automaton with counts of continuations.
//!
//! A node is a set of substrings that end at the same positions of the text. `link` leads to the node of the longest shorter suffix that
//! ends at more positions. The construction is the usual online one (Blumer et al., 1985): one token costs amortized constant time, and a
//! text of n tokens has at most 2n nodes and 3n edges.
//!
//! Counts are exact for contexts of up to `order` - 1 tokens. The walk that updates them visits one node a distinct context of the current
//! position, so it is bounded by `order` and independent of the length of the text.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

const ROOT: u32 = 0;
const NONE: u32 = u32::MAX;
/// Nodes with more edges than this find them in a hash table; others search their list.
const WIDE: u32 = 4;

#[derive(Clone, Copy)]
struct Node {
    /// length of the longest substring
    length: u32,
    link: u32,
    /// positions where the substrings end that count as a continuation
    seen: u32,
    /// counted continuations of the substrings
    continued: u32,
    /// the most frequent continuation, the latest among equals, and its count
    best: u32,
    best_seen: u32,
    /// head of the list of edges
    first: u32,
    degree: u32,
}

const EMPTY: Node = Node {
    length: 0,
    link: NONE,
    seen: 0,
    continued: 0,
    best: NONE,
    best_seen: 0,
    first: NONE,
    degree: 0,
};

#[derive(Clone, Copy)]
struct Edge {
    token: u32,
    target: u32,
    next: u32,
}

/// Multiplicative hashing of a key of 64 bits that is no pointer of an adversary: collisions cost time only.
#[derive(Default)]
struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are u64");
    }

    fn write_u64(&mut self, key: u64) {
        let mixed = (key ^ (key >> 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = mixed ^ (mixed >> 29);
    }
}

/// A place in the automaton: the suffix of some text that has `length` tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    node: u32,
    length: u32,
}

impl Cursor {
    /// Tokens of the matched suffix.
    pub fn length(self) -> u32 {
        self.length
    }
}

/// The most frequent continuation of a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Match {
    pub token: u32,
    /// tokens of the context
    pub length: u32,
    /// how often `token` followed the context
    pub seen: u32,
    /// how often any token followed the context
    pub continued: u32,
}

/// All substrings of a text that grows, with counted continuations of contexts of up to `order` - 1 tokens.
pub struct Automaton {
    most: u32,
    nodes: Vec<Node>,
    edges: Vec<Edge>,
    wide: HashMap<u64, u32, BuildHasherDefault<KeyHasher>>,
    /// the node of the whole text since the last break
    last: u32,
    /// the text's end, at most `most` tokens of it
    context: Cursor,
    tokens: usize,
}

impl Automaton {
    /// Make an empty automaton. `order`, at least 2: the longest context and its continuation, in tokens.
    pub fn new(order: u32) -> Self {
        Self {
            most: order.max(2) - 1,
            nodes: vec![EMPTY],
            edges: Vec::new(),
            wide: HashMap::default(),
            last: ROOT,
            context: Cursor::default(),
            tokens: 0,
        }
    }

    /// Tokens appended.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Bytes of memory in use, spare capacity included.
    pub fn bytes(&self) -> usize {
        let entry = size_of::<(u64, u32)>() + 1;
        self.nodes.capacity() * size_of::<Node>()
            + self.edges.capacity() * size_of::<Edge>()
            + self.wide.capacity() * entry * 8 / 7
    }

    /// The end of the text.
    pub fn end(&self) -> Cursor {
        self.settled(self.context)
    }

    /// Append a token. Only a `counted` one is a continuation that can be proposed; the others are parts of contexts.
    pub fn push(&mut self, token: u32, counted: bool) {
        self.tokens += 1;
        self.last = self.extend(self.last, token);
        let context = self.settled(self.context);
        let mut node = context.node;
        let (mut end, mut before) = (NONE, NONE);
        loop {
            let target = self.target(node, token);
            debug_assert!(target != NONE, "a context of the text has no edge");
            if end == NONE {
                end = target;
            }
            if counted {
                if target != before {
                    self.nodes[target as usize].seen += 1;
                    before = target;
                }
                let seen = self.nodes[target as usize].seen;
                let here = &mut self.nodes[node as usize];
                here.continued += 1;
                if seen >= here.best_seen {
                    (here.best, here.best_seen) = (token, seen);
                }
            }
            if node == ROOT {
                break;
            }
            node = self.nodes[node as usize].link;
        }
        self.context = self.capped(end, context.length + 1);
    }

    /// End a text: contexts of the next token do not reach over this place.
    pub fn cut(&mut self) {
        self.last = ROOT;
        self.context = Cursor::default();
    }

    /// Move a cursor over the next token of its text: the longest suffix of that text that occurs here, of at most `order` - 1 tokens.
    pub fn advance(&self, cursor: Cursor, token: u32) -> Cursor {
        let mut at = self.settled(cursor);
        loop {
            let target = self.target(at.node, token);
            if target != NONE {
                return self.capped(target, at.length + 1);
            }
            if at.node == ROOT {
                return Cursor::default();
            }
            let link = self.nodes[at.node as usize].link;
            at = Cursor {
                node: link,
                length: self.nodes[link as usize].length,
            };
        }
    }

    /// Return the continuation of the longest suffix at the cursor, of at least `shortest` tokens, that one token followed `needed` times.
    pub fn best(&self, cursor: Cursor, shortest: u32, needed: u32) -> Option<Match> {
        let mut at = self.settled(cursor);
        while at.length >= shortest {
            let node = &self.nodes[at.node as usize];
            if node.best_seen >= needed.max(1) {
                return Some(Match {
                    token: node.best,
                    length: at.length,
                    seen: node.best_seen,
                    continued: node.continued,
                });
            }
            if at.node == ROOT {
                return None;
            }
            at = Cursor {
                node: node.link,
                length: self.nodes[node.link as usize].length,
            };
        }
        None
    }

    /// The cursor after nodes were split: the split moves shorter substrings to a new node.
    fn settled(&self, mut cursor: Cursor) -> Cursor {
        while cursor.node != ROOT {
            let link = self.nodes[cursor.node as usize].link;
            if cursor.length > self.nodes[link as usize].length {
                break;
            }
            cursor.node = link;
        }
        cursor
    }

    fn capped(&self, node: u32, length: u32) -> Cursor {
        let length = length.min(self.most);
        self.settled(Cursor { node, length })
    }

    fn key(node: u32, token: u32) -> u64 {
        u64::from(node) << 32 | u64::from(token)
    }

    fn edge(&self, node: u32, token: u32) -> u32 {
        let from = &self.nodes[node as usize];
        if from.degree > WIDE {
            return *self.wide.get(&Self::key(node, token)).unwrap_or(&NONE);
        }
        let mut edge = from.first;
        while edge != NONE && self.edges[edge as usize].token != token {
            edge = self.edges[edge as usize].next;
        }
        edge
    }

    fn target(&self, node: u32, token: u32) -> u32 {
        match self.edge(node, token) {
            NONE => NONE,
            edge => self.edges[edge as usize].target,
        }
    }

    fn add_edge(&mut self, node: u32, token: u32, target: u32) {
        let added = self.edges.len() as u32;
        let from = &mut self.nodes[node as usize];
        self.edges.push(Edge {
            token,
            target,
            next: from.first,
        });
        from.first = added;
        from.degree += 1;
        if from.degree == WIDE + 1 {
            let mut edge = added;
            while edge != NONE {
                let Edge { token, next, .. } = self.edges[edge as usize];
                self.wide.insert(Self::key(node, token), edge);
                edge = next;
            }
        } else if from.degree > WIDE {
            self.wide.insert(Self::key(node, token), added);
        }
    }

    fn add_node(&mut self, node: Node) -> u32 {
        self.nodes.push(node);
        self.nodes.len() as u32 - 1
    }

    /// Return the node of the text `last` continued by `token`.
    fn extend(&mut self, last: u32, token: u32) -> u32 {
        let length = self.nodes[last as usize].length + 1;
        let known = self.target(last, token);
        if known != NONE {
            return self.split(last, token, known);
        }
        let added = self.add_node(Node { length, ..EMPTY });
        let mut node = last;
        let link = loop {
            let target = self.target(node, token);
            if target != NONE {
                break self.split(node, token, target);
            }
            self.add_edge(node, token, added);
            if node == ROOT {
                break ROOT;
            }
            node = self.nodes[node as usize].link;
        };
        self.nodes[added as usize].link = link;
        added
    }

    /// Return the node in which the substring of `node` continued by `token` is the longest: `target`, or a new node split off it.
    fn split(&mut self, node: u32, token: u32, target: u32) -> u32 {
        let length = self.nodes[node as usize].length + 1;
        if self.nodes[target as usize].length == length {
            return target;
        }
        // The shorter substrings of `target` end at the same positions so far: its counts and continuations are theirs.
        let original = self.nodes[target as usize];
        let shorter = self.add_node(Node {
            length,
            first: NONE,
            degree: 0,
            ..original
        });
        let mut edge = original.first;
        while edge != NONE {
            let Edge {
                token,
                target,
                next,
            } = self.edges[edge as usize];
            self.add_edge(shorter, token, target);
            edge = next;
        }
        self.nodes[target as usize].link = shorter;
        let mut from = node;
        loop {
            let edge = self.edge(from, token);
            if edge == NONE || self.edges[edge as usize].target != target {
                break;
            }
            self.edges[edge as usize].target = shorter;
            if from == ROOT {
                break;
            }
            from = self.nodes[from as usize].link;
        }
        shorter
    }
}
