//! A disk that fails, by seed.
//!
//! A [`FaultRule`] says which requests it means (operation, range, a count of requests to let
//! pass first), how often it strikes and what happens then. The first rule that strikes decides.
//!
//! A write that is cut short or torn becomes writes of this layer's own: a prefix of the range, or
//! some of its sectors, is written below, and when that is done the request fails. So a guest sees
//! an error, and the disk beneath holds what a disk would hold after a loss of power or a broken
//! cable in mid-write.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use fathom_block::{
    Capabilities, Crossing, ErrorKind, Layer, LayerPart, LayerQueue, OpenContext, Operation,
    Outcome, Request, SECTOR_SIZE,
};
use fathom_options::{Bytes, Check};
use serde::{Deserialize, Serialize};

use crate::generator;
use crate::kind::{Key, LayerContext, LayerOptions, Operations};

/// The configuration of a layer that makes requests fail: one rule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FaultOptions {
    /// What happens to a request that is struck.
    pub effect: FaultEffect,
    /// The share of the requests that is struck, from 0 to 1.
    pub rate: f64,
    /// The operations that are meant.
    #[serde(skip_serializing_if = "Operations::is_default")]
    pub operations: Operations,
    /// Where the part of the disk that is meant begins.
    pub offset: Bytes,
    /// How long that part is; the rest of the disk where it is 0. Where both are 0, requests without
    /// a range are meant too.
    pub length: Bytes,
    /// How many requests pass before the first is struck.
    pub after: u64,
    /// How many are struck at most; any number where there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub strikes_max: Option<u64>,
    /// Makes the draws repeatable.
    pub seed: u64,
}

impl Default for FaultOptions {
    /// Every request fails.
    fn default() -> Self {
        Self {
            effect: FaultEffect::Refused,
            rate: 1.0,
            operations: Operations::default(),
            offset: Bytes(0),
            length: Bytes(0),
            after: 0,
            strikes_max: None,
            seed: 0,
        }
    }
}

impl LayerOptions for FaultOptions {
    const KIND: &'static str = "fault";
    const MEANING: &'static str = "makes requests fail, by seed, operation, range and count";
    const KEYS: &'static [Key] = &[
        Key::new(
            "effect",
            "\"refused\"",
            "`\"refused\"`: nothing of it is carried out; `\"late\"`: it is carried out and fails \
             all the same; `\"short\"`: a prefix is written; `\"torn\"`: some sectors are written",
        ),
        Key::new("rate", "1.0", "the share of the requests that is struck, from 0 to 1"),
        Key::new("operations", "[]", "the operations that are meant; all where none is named"),
        Key::new("offset", "0", "where the part of the disk that is meant begins"),
        Key::new("length", "0", "how long that part is; the rest of the disk where it is 0"),
        Key::new("after", "0", "how many requests pass before the first is struck"),
        Key::new("strikes_max", "", "how many are struck at most; any number where there is none"),
        Key::new("seed", "0", "makes the draws repeatable"),
    ];

    fn check(&self, check: &mut Check<'_>) {
        if !(0.0..=1.0).contains(&self.rate) {
            check.problem(
                "rate",
                format!("a rate of {} is no share", self.rate),
                "choose a number from 0 to 1: 0.01 strikes one request in a hundred",
            );
        }
        if self.offset.0.checked_add(self.length.0).is_none() {
            check.problem("offset", "`offset` and `length` lead too far", "shorten them");
        }
    }

    fn make(&self, _: &LayerContext<'_>) -> io::Result<Option<Arc<dyn Layer>>> {
        let (offset, length) = (self.offset.0, self.length.0);
        let end = if length > 0 { offset.saturating_add(length) } else { u64::MAX };
        let rule = FaultRule {
            operations: self.operations.named().to_vec(),
            range: (offset > 0 || length > 0).then_some(offset..end),
            after: self.after,
            rate: self.rate,
            strikes_max: self.strikes_max.unwrap_or(u64::MAX),
            effect: self.effect,
            ..FaultRule::default()
        };
        Ok(Some(Arc::new(Fault::new(vec![rule], self.seed))))
    }
}

/// What happens to a request that a rule strikes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultEffect {
    /// It fails, and nothing of it reaches the disk.
    #[default]
    Refused,
    /// It is carried out, and fails all the same.
    Late,
    /// A prefix of what it modifies reaches the disk, and it fails. Operations that modify nothing
    /// are refused.
    Short,
    /// Any of the sectors that it modifies reach the disk, and it fails. Operations that modify
    /// nothing are refused.
    Torn,
}

/// Which requests fail, how often and how.
#[derive(Clone, Debug)]
pub struct FaultRule {
    /// The operations that are meant; an empty list means all.
    pub operations: Vec<Operation>,
    /// The bytes of the disk that are meant: every request that touches one of them. `None` means
    /// all requests, with and without a range.
    pub range: Option<Range<u64>>,
    /// How many of the requests that are meant pass before the rule begins to strike.
    pub after: u64,
    /// The share of the requests that it strikes from then on, from 0 to 1.
    pub rate: f64,
    /// How often it strikes at most.
    pub strikes_max: u64,
    /// What happens.
    pub effect: FaultEffect,
    /// The error that the request fails with.
    pub error: ErrorKind,
}

impl Default for FaultRule {
    /// Every request fails with an I/O error.
    fn default() -> Self {
        Self {
            operations: Vec::new(),
            range: None,
            after: 0,
            rate: 1.0,
            strikes_max: u64::MAX,
            effect: FaultEffect::Refused,
            error: ErrorKind::Io,
        }
    }
}

impl FaultRule {
    fn means(&self, request: &Request) -> bool {
        if !self.operations.is_empty() && !self.operations.contains(&request.operation) {
            return false;
        }
        self.range.as_ref().is_none_or(|range| {
            request.operation.has_range()
                && request.offset < range.end
                && request.offset + request.length > range.start
        })
    }
}

struct Shared {
    rules: Vec<FaultRule>,
    /// For each rule, how many requests it meant.
    meant: Vec<AtomicU64>,
    /// For each rule, how many requests it struck.
    strikes: Vec<AtomicU64>,
    enabled: AtomicBool,
    atom: u64,
}

/// A layer that makes requests fail.
pub struct Fault {
    shared: Arc<Shared>,
    seed: u64,
}

impl Fault {
    /// A layer with `rules`, switched on. `seed` determines which requests are struck and what of
    /// them is left.
    pub fn new(rules: Vec<FaultRule>, seed: u64) -> Self {
        Self::with_atom(rules, seed, SECTOR_SIZE)
    }

    /// The same for a disk that writes `atom` bytes wholly or not at all: a multiple of the disk's
    /// alignment, at least 1.
    pub fn with_atom(rules: Vec<FaultRule>, seed: u64, atom: u64) -> Self {
        let zeroes = || rules.iter().map(|_| AtomicU64::new(0)).collect();
        let (meant, strikes) = (zeroes(), zeroes());
        let enabled = AtomicBool::new(true);
        let atom = atom.max(1);
        Self { shared: Arc::new(Shared { rules, meant, strikes, enabled, atom }), seed }
    }

    /// Switches all rules on or off, from the next request on.
    pub fn set_enabled(&self, enabled: bool) {
        self.shared.enabled.store(enabled, Ordering::Relaxed);
    }

    /// Whether the rules are switched on.
    pub fn is_enabled(&self) -> bool {
        self.shared.enabled.load(Ordering::Relaxed)
    }

    /// How many requests each rule has struck, in the order of the rules.
    pub fn strikes(&self) -> Vec<u64> {
        self.shared.strikes.iter().map(|count| count.load(Ordering::Relaxed)).collect()
    }
}

impl Layer for Fault {
    fn name(&self) -> &'static str {
        "fault"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn open_queue(&self, context: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        Ok(LayerPart::queue(FaultQueue {
            shared: Arc::clone(&self.shared),
            random: generator(self.seed, context.queue()),
            partial: HashMap::new(),
            partial_count: 0,
        }))
    }
}

/// A request of which only pieces reach the disk.
struct Partial {
    request: Box<Request>,
    error: ErrorKind,
    pieces_left: usize,
}

struct FaultQueue {
    shared: Arc<Shared>,
    random: fastrand::Rng,
    /// By number: requests whose pieces are under way.
    partial: HashMap<u64, Partial>,
    partial_count: u64,
}

impl FaultQueue {
    /// The effect and error of the first rule that strikes.
    fn strike(&mut self, request: &Request) -> Option<(FaultEffect, ErrorKind)> {
        for (index, rule) in self.shared.rules.iter().enumerate() {
            if !rule.means(request) {
                continue;
            }
            let meant = self.shared.meant[index].fetch_add(1, Ordering::Relaxed);
            if meant < rule.after || self.random.f64() >= rule.rate {
                continue;
            }
            let strikes = &self.shared.strikes[index];
            if strikes.fetch_add(1, Ordering::Relaxed) < rule.strikes_max {
                return Some((rule.effect, rule.error));
            }
            strikes.fetch_sub(1, Ordering::Relaxed);
        }
        None
    }

    /// The parts of `range` that reach the disk.
    fn pieces(&mut self, request: &Request, effect: FaultEffect) -> Vec<Range<u64>> {
        let atom = self.shared.atom;
        let end = request.offset + request.length;
        let atoms = request.length.div_ceil(atom);
        let cut = |index: u64| (request.offset + index * atom).min(end);
        let mut pieces: Vec<Range<u64>> = Vec::new();
        if effect == FaultEffect::Short {
            let kept = self.random.u64(0..atoms);
            if kept > 0 {
                pieces.push(request.offset..cut(kept));
            }
            return pieces;
        }
        let mut kept = 0;
        for index in 0..atoms {
            // At least one atom is lost, so that the request has a reason to fail.
            let last_chance = kept == index && index + 1 == atoms;
            if last_chance || self.random.bool() {
                continue;
            }
            kept += 1;
            match pieces.last_mut() {
                Some(last) if last.end == cut(index) => last.end = cut(index + 1),
                _ => pieces.push(cut(index)..cut(index + 1)),
            }
        }
        pieces
    }

    fn submit_partial(
        &mut self,
        request: Box<Request>,
        effect: FaultEffect,
        error: ErrorKind,
        next: &mut Crossing<'_>,
    ) {
        let pieces = self.pieces(&request, effect);
        if pieces.is_empty() {
            next.complete(request, Err(error));
            return;
        }
        let number = self.partial_count;
        self.partial_count += 1;
        for piece in &pieces {
            let mut part = next.request();
            part.operation = request.operation;
            part.flags = request.flags;
            part.offset = piece.start;
            part.length = piece.end - piece.start;
            part.inherit(&request, piece.start - request.offset);
            part.token = number;
            if request.operation.carries_data() {
                part.buffers.allocate(part.length as usize);
                let memory = part.buffers.owned_mut().expect("memory was allocated above");
                request.buffers.copy_to(piece.start - request.offset, memory);
            }
            next.submit(part);
        }
        self.partial.insert(number, Partial { request, error, pieces_left: pieces.len() });
    }
}

/// What the layer's word on a request means: nothing, or the error to put in place of a success.
const LATE: u64 = 1 << 32;

impl LayerQueue for FaultQueue {
    fn submit(&mut self, mut request: Box<Request>, next: &mut Crossing<'_>) {
        let struck =
            if self.shared.enabled.load(Ordering::Relaxed) { self.strike(&request) } else { None };
        let Some((effect, error)) = struck else {
            next.submit(request);
            return;
        };
        match effect {
            FaultEffect::Late => {
                *next.word(&mut request) = LATE | error as u64;
                next.submit(request);
            }
            FaultEffect::Short | FaultEffect::Torn if request.operation.modifies() => {
                self.submit_partial(request, effect, error, next);
            }
            FaultEffect::Refused | FaultEffect::Short | FaultEffect::Torn => {
                next.complete(request, Err(error));
            }
        }
    }

    fn complete(&mut self, mut request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        let word = *next.word(&mut request);
        let late = ErrorKind::ALL.iter().find(|error| word == LATE | **error as u64);
        let outcome = outcome.and(late.map_or(Ok(()), |error| Err(*error)));
        next.complete(request, outcome);
    }

    fn returned(&mut self, request: Box<Request>, _outcome: Outcome, next: &mut Crossing<'_>) {
        // What became of a piece does not matter: the request fails whichever way.
        let number = request.token;
        next.recycle(request);
        let Some(partial) = self.partial.get_mut(&number) else { return };
        partial.pieces_left -= 1;
        if partial.pieces_left == 0 {
            if let Some(partial) = self.partial.remove(&number) {
                next.complete(partial.request, Err(partial.error));
            }
        }
    }
}
