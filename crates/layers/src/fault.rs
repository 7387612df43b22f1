//! A layer that makes requests fail, by seed.
//!
//! A [`FaultRule`] selects requests by operation, range and a number of requests to skip first. It
//! has a rate at which it strikes, and an effect. The first rule that strikes a request determines
//! its fate.
//!
//! A short or torn write is replaced by writes of this layer: it writes a prefix of the range, or
//! some of its sectors, and then fails the request. So the guest sees an error, and the disk
//! beneath has the content that a disk has after a power loss or a cable fault during a write.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use fathom_block::{
    Capabilities, Crossing, ErrorKind, Layer, LayerPart, LayerQueue, OpenContext, Operation,
    Outcome, Request, SECTOR_SIZE,
};
use fathom_failure::Failure;
use fathom_options::{Bytes, Check, Key};
use serde::{Deserialize, Serialize};

use crate::generator;
use crate::kind::{LayerContext, LayerOptions, Operations, Rank};

/// The configuration of a layer that makes requests fail, by one rule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FaultOptions {
    /// The effect on a request that is struck.
    pub effect: FaultEffect,
    /// The share of the selected requests that are struck, from 0 to 1.
    pub rate: f64,
    /// The selected operations.
    #[serde(skip_serializing_if = "Operations::is_default")]
    pub operations: Operations,
    /// The offset of the selected range of the disk.
    pub offset: Bytes,
    /// The length of the selected range; 0 for the rest of the disk. If both are 0, requests
    /// without a range are selected, too.
    pub length: Bytes,
    /// The number of selected requests that pass before the first is struck.
    pub after: u64,
    /// The most requests that are struck; no limit by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub strikes_max: Option<u64>,
    /// The seed of the random choices.
    pub seed: u64,
}

impl Default for FaultOptions {
    /// All requests fail.
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
    const RANK: Rank = Rank::Trial;
    const MEANING: &'static str = "makes requests fail, by seed, operation, range and count";
    const KEYS: &'static [Key] = &[
        Key::new(
            "effect",
            "\"refused\"",
            "`\"refused\"`: the request is not carried out; `\"late\"`: it is carried out, and then \
             fails; `\"short\"`: only a prefix is written; `\"torn\"`: only some sectors are written",
        ),
        Key::new("rate", "1.0", "the share of the selected requests that are struck, from 0 to 1"),
        Key::new("operations", "[]", "the selected operations; all by default"),
        Key::new("offset", "0", "the offset of the selected range of the disk"),
        Key::new("length", "0", "the length of that range; 0 for the rest of the disk"),
        Key::new(
            "after",
            "0",
            "the number of selected requests that pass before the first is struck",
        ),
        Key::new("strikes_max", "", "the most requests that are struck; no limit by default"),
        Key::new("seed", "0", "the seed of the random choices"),
    ];

    fn check(&self, check: &mut Check<'_>) {
        if !(0.0..=1.0).contains(&self.rate) {
            check.problem(
                "rate",
                format!("a rate of {} is not between 0 and 1", self.rate),
                "choose a number from 0 to 1: 0.01 strikes one request in a hundred",
            );
        }
        if self.offset.0.checked_add(self.length.0).is_none() {
            check.problem(
                "offset",
                "`offset` plus `length` exceeds 64 bits",
                "choose smaller values",
            );
        }
    }

    fn make(&self, _: &LayerContext<'_>) -> Result<Option<Arc<dyn Layer>>, Failure> {
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

/// The effect on a request that a rule strikes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultEffect {
    /// It fails, and is not carried out.
    #[default]
    Refused,
    /// It is carried out, and then fails.
    Late,
    /// Only a prefix of the modified range reaches the disk, and the request fails. An operation
    /// that modifies nothing is refused.
    Short,
    /// Only some of the modified sectors reach the disk, and the request fails. An operation that
    /// modifies nothing is refused.
    Torn,
}

/// A rule that selects requests to fail.
#[derive(Clone, Debug)]
pub struct FaultRule {
    /// The selected operations; an empty list selects all.
    pub operations: Vec<Operation>,
    /// The selected bytes of the disk: a request is selected if it touches one of them. `None`
    /// selects all requests, with and without a range.
    pub range: Option<Range<u64>>,
    /// The number of selected requests that pass before the rule begins to strike.
    pub after: u64,
    /// The share of the selected requests that the rule then strikes, from 0 to 1.
    pub rate: f64,
    /// The most requests that the rule strikes.
    pub strikes_max: u64,
    /// The effect on a request that is struck.
    pub effect: FaultEffect,
    /// The error with which the request fails.
    pub error: ErrorKind,
}

impl Default for FaultRule {
    /// All requests fail with an I/O error.
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
    fn selects(&self, request: &Request) -> bool {
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
    /// The number of selected requests of each rule.
    selected: Vec<AtomicU64>,
    /// The number of struck requests of each rule.
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
    /// A layer with `rules`, enabled. `seed` determines which requests are struck, and which of
    /// their parts are written.
    pub fn new(rules: Vec<FaultRule>, seed: u64) -> Self {
        Self::with_atom(rules, seed, SECTOR_SIZE)
    }

    /// The same for a disk that writes units of `atom` bytes atomically: a multiple of the disk's
    /// alignment, at least 1.
    pub fn with_atom(rules: Vec<FaultRule>, seed: u64, atom: u64) -> Self {
        let zeroes = || rules.iter().map(|_| AtomicU64::new(0)).collect();
        let (selected, strikes) = (zeroes(), zeroes());
        let enabled = AtomicBool::new(true);
        let atom = atom.max(1);
        Self { shared: Arc::new(Shared { rules, selected, strikes, enabled, atom }), seed }
    }

    /// Enables or disables all rules, from the next request on.
    pub fn set_enabled(&self, enabled: bool) {
        self.shared.enabled.store(enabled, Ordering::Relaxed);
    }

    /// Whether the rules are enabled.
    pub fn is_enabled(&self) -> bool {
        self.shared.enabled.load(Ordering::Relaxed)
    }

    /// The number of requests that each rule has struck, in the order of the rules.
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

/// A request of which only some pieces reach the disk.
struct Partial {
    request: Box<Request>,
    error: ErrorKind,
    pieces_left: usize,
}

struct FaultQueue {
    shared: Arc<Shared>,
    random: fastrand::Rng,
    /// Requests whose pieces are in flight, by number.
    partial: HashMap<u64, Partial>,
    partial_count: u64,
}

impl FaultQueue {
    /// The effect and error of the first rule that strikes `request`.
    fn strike(&mut self, request: &Request) -> Option<(FaultEffect, ErrorKind)> {
        for (index, rule) in self.shared.rules.iter().enumerate() {
            if !rule.selects(request) {
                continue;
            }
            let selected = self.shared.selected[index].fetch_add(1, Ordering::Relaxed);
            if selected < rule.after || self.random.f64() >= rule.rate {
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

    /// The parts of the request's range that reach the disk.
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
            // At least one atom is not written, so that the error is true.
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

/// The layer's word of a request is 0, or this bit and the error that replaces a success.
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
        // The outcome of a piece does not matter: the request fails in any case.
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
