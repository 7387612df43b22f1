//! The copier of a move: the only layer of a disk over the source that no front end uses.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fathom_block::{
    Backend, Capabilities, Crossing, ErrorKind, Layer, LayerPart, LayerQueue, OpenContext,
    Operation, Outcome, Request, StoreId,
};

use super::BRAKE_MAX_NS;
use super::pace::Pace;
use super::piece::{DATA_MAX, Piece, PieceKind, divide, pieces_of};
use super::state::{MoveFailure, MovePart, MoveStage, MoveState};

/// The pieces in flight.
const DEPTH: usize = 8;
/// The bytes about which the source is asked at once which of them are holes.
const SPAN_MAX: u64 = 64 << 20;
/// The bytes that may be left for the time in which the disk serves no requests, and the most of a
/// small disk: this part of it.
const LEVEL_MAX: u64 = 4 << 20;
const LEVEL_PART: u64 = 64;
/// The interval between passes while little is left, in nanoseconds.
const REST_NS: u64 = 50_000_000;
/// How long writes are held at first if guests change more than is copied, in nanoseconds.
const BRAKE_NS: u64 = 1_000_000;

/// What a request of the copier does: its token.
mod purpose {
    pub(super) const EXTENTS: u64 = 0;
    pub(super) const READ: u64 = 1;
    pub(super) const WRITE: u64 = 2;
    pub(super) const ZERO: u64 = 3;
    pub(super) const FLUSH: u64 = 4;
}

/// The layer that copies the store beneath it to another one. The disk has one queue, without
/// requests of a front end.
pub struct MoveCopier {
    state: Arc<MoveState>,
    target: Arc<dyn Backend>,
}

impl MoveCopier {
    /// The copier of the move with this state.
    pub fn new(state: Arc<MoveState>, target: Arc<dyn Backend>) -> Self {
        Self { state, target }
    }
}

impl Layer for MoveCopier {
    fn name(&self) -> &'static str {
        "move"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn open_queue(&self, context: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        let store = context.open_store(&self.target)?;
        let background = context.background("move")?;
        let waker = context.waker()?;
        let state = Arc::clone(&self.state);
        let total = state.regions.capacity();
        let pace = Pace::new(background, state.options.speed, total, context.now_ns());
        let unit = context.below().geometry.alignment.max(self.target.geometry().alignment);
        state.set_waker(waker);
        Ok(LayerPart::queue(CopierQueue {
            knows_extents: context.below().capabilities.extents,
            zeroes: self.target.capabilities().write_zeroes,
            unit: u64::from(unit.max(1)),
            is_blank: state.options.is_blank,
            state,
            store,
            pace,
            cursor: 0,
            span: None,
            is_asking: false,
            ready: VecDeque::new(),
            in_flight: 0,
            left_before: u64::MAX,
            is_flushing: false,
            is_flushed: false,
            rest_ns: 0,
            is_closed: false,
        }))
    }
}

struct CopierQueue {
    state: Arc<MoveState>,
    store: StoreId,
    pace: Pace,
    /// Whether the source knows its holes, and whether the target has an operation for zeroes.
    knows_extents: bool,
    zeroes: bool,
    /// The bytes of which both sides accept multiples.
    unit: u64,
    /// Whether the target reads as zeroes wherever the pass has not come: it is the first one.
    is_blank: bool,
    /// Where the pass continues, in bytes. Within a pass each region is taken once, so no two
    /// pieces in flight overlap.
    cursor: u64,
    /// What has been taken, and is still to be divided into pieces.
    span: Option<Range<u64>>,
    is_asking: bool,
    ready: VecDeque<Piece>,
    in_flight: usize,
    /// The bytes that were left at the end of the pass before.
    left_before: u64,
    is_flushing: bool,
    /// Whether the target is durable as of the end of the last pass.
    is_flushed: bool,
    /// Until when the copier rests, in nanoseconds.
    rest_ns: u64,
    is_closed: bool,
}

impl CopierQueue {
    /// Begins what can begin.
    fn go(&mut self, next: &mut Crossing<'_>) {
        let stage = self.state.stage();
        let has_ended = matches!(stage, MoveStage::Failed(_) | MoveStage::Stopped);
        if has_ended || self.is_closed || self.state.is_stopping() {
            if self.in_flight == 0 && !has_ended {
                self.state.turn(MoveStage::Stopped);
            }
            return;
        }
        if stage == MoveStage::Equal {
            return;
        }
        let is_finishing = stage == MoveStage::Finishing;
        while self.in_flight < DEPTH {
            if let Some(piece) = self.ready.front().copied() {
                if !is_finishing && !self.may_begin(piece, next) {
                    return;
                }
                self.ready.pop_front();
                self.begin(piece, is_finishing, next);
            } else if self.is_asking || self.is_flushing {
                return;
            } else if !is_finishing && next.now_ns() < self.rest_ns {
                return next.wake_at(self.rest_ns);
            } else if !self.divide_next(next) {
                if self.in_flight == 0 {
                    self.end_pass(is_finishing, next);
                }
                return;
            }
        }
    }

    /// Whether a piece may begin by the pace.
    fn may_begin(&mut self, piece: Piece, next: &mut Crossing<'_>) -> bool {
        // Zeroes move no data.
        let bytes = if piece.kind == PieceKind::Zeroes { 0 } else { piece.length };
        if self.state.options.urgent && self.state.options.speed.is_none() {
            return true;
        }
        let is_first = self.state.passes.load(Ordering::Relaxed) == 0 && !self.state.options.urgent;
        let waiting = self.state.regions.marked_bytes().saturating_add(bytes);
        match self.pace.ask(bytes, waiting, is_first, next.now_ns()) {
            Ok(()) => true,
            Err(again_ns) => {
                if again_ns != u64::MAX {
                    next.wake_at(again_ns);
                }
                false
            }
        }
    }

    /// Takes the next regions and finds out what they have. Returns false at the end of the pass.
    fn divide_next(&mut self, next: &mut Crossing<'_>) -> bool {
        if self.span.is_none() {
            self.span = self.state.regions.take(self.cursor, SPAN_MAX);
        }
        let Some(span) = self.span.clone() else { return false };
        if !self.knows_extents {
            self.span = None;
            self.cursor = span.end;
            self.ready.extend(pieces_of(PieceKind::Data, span));
            return true;
        }
        let mut own = next.request();
        own.operation = Operation::Extents;
        (own.offset, own.length) = (span.start, span.end - span.start);
        own.token = purpose::EXTENTS;
        self.is_asking = true;
        self.in_flight += 1;
        next.submit(own);
        true
    }

    /// The source has answered what is a hole.
    fn divided(&mut self, request: &Request, outcome: Outcome) {
        self.is_asking = false;
        let Some(span) = self.span.take() else { return };
        let (pieces, end) = match outcome {
            Ok(()) => divide(&span, &request.extents, self.unit),
            // Without an answer, everything is data.
            Err(_) => (pieces_of(PieceKind::Data, span.clone()).collect(), span.end),
        };
        let is_blank = self.is_blank;
        let pieces = pieces.into_iter().filter(|it| !is_blank || it.kind != PieceKind::Zeroes);
        self.ready.extend(pieces);
        self.cursor = end;
        if end < span.end {
            self.span = Some(end..span.end);
        }
    }

    fn begin(&mut self, piece: Piece, is_finishing: bool, next: &mut Crossing<'_>) {
        let mut own = next.request();
        own.flags.background = !is_finishing;
        (own.offset, own.length) = (piece.offset, piece.length);
        self.in_flight += 1;
        self.is_flushed = false;
        match piece.kind {
            PieceKind::Data => {
                own.operation = Operation::Read;
                own.token = purpose::READ;
                own.buffers.allocate(piece.length as usize);
                next.submit(own);
            }
            PieceKind::Zeroes if self.zeroes => {
                own.operation = Operation::WriteZeroes;
                own.token = purpose::ZERO;
                next.submit_to(self.store, own);
            }
            PieceKind::Zeroes | PieceKind::WrittenZeroes => {
                let length = piece.length.min(DATA_MAX);
                if length < piece.length {
                    let rest = Piece {
                        offset: piece.offset + length,
                        length: piece.length - length,
                        ..piece
                    };
                    self.ready.push_front(rest);
                }
                own.operation = Operation::Write;
                own.token = purpose::WRITE;
                own.length = length;
                own.buffers.allocate(length as usize);
                own.buffers.fill_zero(0, length as usize);
                next.submit_to(self.store, own);
            }
        }
    }

    /// Data has been read: it is written to the target, or zeroed there.
    fn read(&mut self, mut own: Box<Request>, next: &mut Crossing<'_>) {
        let bytes = own.buffers.owned().unwrap_or_default();
        if bytes.iter().any(|byte| *byte != 0) {
            own.operation = Operation::Write;
            own.token = purpose::WRITE;
            return next.submit_to(self.store, own);
        }
        let piece = Piece { kind: PieceKind::Zeroes, offset: own.offset, length: own.length };
        let is_finishing = !own.flags.background;
        next.recycle(own);
        self.in_flight -= 1;
        if !self.is_blank {
            self.begin(piece, is_finishing, next);
        }
    }

    /// All regions have been looked at, and nothing is in flight.
    fn end_pass(&mut self, is_finishing: bool, next: &mut Crossing<'_>) {
        self.pace.end_step(next.now_ns());
        let is_first = self.state.passes.fetch_add(1, Ordering::Relaxed) == 0;
        (self.cursor, self.is_blank) = (0, false);
        let left = self.state.regions.marked_bytes();
        match (is_finishing, left) {
            (true, 0) if self.is_flushed => {
                return self.state.advance(MoveStage::Finishing, MoveStage::Equal);
            }
            (true, 0) => return self.flush(next),
            (true, _) => return self.go(next),
            (false, _) => {}
        }
        let is_level = left <= LEVEL_MAX.min(self.state.regions.capacity() / LEVEL_PART);
        self.brake(left, is_first, is_level);
        if !is_level {
            self.state.advance(MoveStage::Level, MoveStage::Copying);
            return self.go(next);
        }
        self.pace.rest();
        if self.is_flushed {
            self.state.advance(MoveStage::Copying, MoveStage::Level);
            self.rest_ns = next.now_ns().saturating_add(REST_NS);
            next.wake_at(self.rest_ns);
        } else {
            self.flush(next);
        }
    }

    /// Slows guests down if a pass leaves nearly as much as the one before.
    fn brake(&mut self, left: u64, is_first: bool, is_level: bool) {
        let brake_ns = self.state.brake_ns.load(Ordering::Relaxed);
        let is_gaining = left < self.left_before / 4 * 3;
        self.left_before = left;
        if is_first || is_level || is_gaining {
            return;
        }
        let brake_ns = (brake_ns * 2).clamp(BRAKE_NS, BRAKE_MAX_NS);
        self.state.brake_ns.store(brake_ns, Ordering::Relaxed);
    }

    fn flush(&mut self, next: &mut Crossing<'_>) {
        let mut own = next.request();
        own.operation = Operation::Flush;
        own.token = purpose::FLUSH;
        self.is_flushing = true;
        self.in_flight += 1;
        next.submit_to(self.store, own);
    }

    /// What was copied is durable.
    fn flushed(&mut self, next: &mut Crossing<'_>) {
        self.is_flushed = true;
        // In the stage `Finishing`, nobody marks regions.
        let is_equal =
            self.state.regions.marked_bytes() == 0 && self.span.is_none() && self.ready.is_empty();
        if is_equal {
            self.state.advance(MoveStage::Finishing, MoveStage::Equal);
        }
        self.state.advance(MoveStage::Copying, MoveStage::Level);
        self.rest_ns = next.now_ns().saturating_add(REST_NS);
        next.wake_at(self.rest_ns);
    }

    fn fail(&mut self, part: MovePart, request: &Request, error: ErrorKind) {
        self.state.brake_ns.store(0, Ordering::Relaxed);
        let (operation, offset) = (request.operation, request.offset);
        self.state.turn(MoveStage::Failed(MoveFailure { part, operation, offset, error }));
        self.ready.clear();
    }
}

impl LayerQueue for CopierQueue {
    fn submit(&mut self, request: Box<Request>, next: &mut Crossing<'_>) {
        next.complete(request, Err(ErrorKind::Unsupported));
    }

    fn complete(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        next.complete(request, outcome);
    }

    fn returned(&mut self, own: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        match (own.token, outcome) {
            (purpose::READ, Ok(())) => self.read(own, next),
            (purpose::EXTENTS, outcome) => {
                self.in_flight -= 1;
                self.divided(&own, outcome);
                next.recycle(own);
            }
            (token, outcome) => {
                self.in_flight -= 1;
                self.is_flushing &= token != purpose::FLUSH;
                match outcome {
                    Ok(()) if token == purpose::FLUSH => self.flushed(next),
                    Ok(()) if token == purpose::WRITE => {
                        self.state.copied_bytes.fetch_add(own.length, Ordering::Relaxed);
                    }
                    Ok(()) => {}
                    // A device may refuse ranges that are not multiples of its own blocks.
                    Err(error) if token == purpose::ZERO && error != ErrorKind::NoSpace => {
                        let range = own.offset..own.offset + own.length;
                        self.ready.extend(pieces_of(PieceKind::WrittenZeroes, range));
                    }
                    Err(error) => {
                        let is_read = token == purpose::READ;
                        let part = if is_read { MovePart::Source } else { MovePart::Target };
                        self.fail(part, &own, error);
                    }
                }
                next.recycle(own);
            }
        }
        self.go(next);
        if self.in_flight == 0 {
            self.pace.end_step(next.now_ns());
            // The step that has just ended may have been what the next piece waited for.
            if !self.ready.is_empty() {
                self.go(next);
            }
        }
    }

    fn advance(&mut self, next: &mut Crossing<'_>) {
        self.go(next);
    }

    fn close(&mut self, next: &mut Crossing<'_>) {
        self.is_closed = true;
        self.go(next);
    }
}
