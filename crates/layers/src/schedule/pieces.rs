//! Large requests, which are passed on in pieces: in between, it may be another disk's turn.

use std::collections::HashMap;

use fathom_block::{Course, Crossing, ErrorKind, HeldBy, Outcome, Request, Split};

use super::held::length;

/// The length from which on requests are passed on in pieces, and that of a piece, in bytes.
pub(super) const PIECE: u64 = 128 << 10;

/// The length of a piece beside a heavier disk that does not wait for its share, in bytes.
pub(super) const SMALL_PIECE: u64 = 32 << 10;

/// What is left of a large request.
pub(super) struct Remainder {
    split: Split,
    /// The number of the request, and the front end's number for it.
    id: u64,
    token: u64,
    /// The bytes of the request that are left.
    from: u64,
    end: u64,
    is_work_of_layers: bool,
}

/// A piece of a large request that is to be passed on.
pub(super) struct Piece {
    split: Split,
    id: u64,
    token: u64,
    from: u64,
    pub length: u64,
    is_last: bool,
}

/// A request that waits for its turn.
pub(super) enum Item {
    Whole(Box<Request>),
    Left(Remainder),
}

/// A request that is to be passed on.
pub(super) enum Part {
    Whole(Box<Request>),
    Piece(Piece),
}

impl Item {
    /// The number of bytes that are passed on next, in pieces of at most `piece` bytes.
    pub(super) fn next_length(&self, piece: u64) -> u64 {
        match self {
            Self::Whole(request) => length(request),
            Self::Left(rest) => (rest.end - rest.from).min(piece),
        }
    }

    pub(super) fn is_work_of_layers(&self) -> bool {
        match self {
            Self::Whole(request) => request.flags.is_work_of_layers(),
            Self::Left(rest) => rest.is_work_of_layers,
        }
    }

    /// Takes the next part. Returns also what is left.
    pub(super) fn next(self, piece: u64) -> (Part, Option<Self>) {
        let length = self.next_length(piece);
        match self {
            Self::Whole(request) => (Part::Whole(request), None),
            Self::Left(rest) => rest.take(length),
        }
    }

    /// Takes all that is left.
    pub(super) fn whole(self) -> Part {
        match self {
            Self::Whole(request) => Part::Whole(request),
            Self::Left(rest) => {
                let length = rest.end - rest.from;
                rest.take(length).0
            }
        }
    }
}

impl Remainder {
    fn take(self, length: u64) -> (Part, Option<Item>) {
        let Self { split, id, token, from, end, is_work_of_layers } = self;
        let is_last = from + length >= end;
        let left = (!is_last).then_some(Item::Left(Self {
            split,
            id,
            token,
            from: from + length,
            end,
            is_work_of_layers,
        }));
        (Part::Piece(Piece { split, id, token, from, length, is_last }), left)
    }
}

impl Part {
    /// The number of bytes that it transfers.
    pub(super) fn length(&self) -> u64 {
        match self {
            Self::Whole(request) => length(request),
            Self::Piece(piece) => piece.length,
        }
    }
}

/// A large request, some of whose pieces have not returned.
#[derive(Default)]
struct Parent {
    /// How long it has waited for its first piece, in nanoseconds.
    held_ns: u64,
    /// Whether its front end has taken it back before all pieces were passed on.
    is_withdrawn: bool,
}

/// The large requests of a queue, by number.
#[derive(Default)]
pub(super) struct Parents(HashMap<u64, Parent>);

impl Parents {
    /// Begins to pass on a request in pieces.
    pub(super) fn begin(&mut self, request: Box<Request>, next: &mut Crossing<'_>) -> Item {
        let (id, token, end) = (request.id, request.token, request.length);
        let is_work_of_layers = request.flags.is_work_of_layers();
        self.0.insert(id, Parent::default());
        Item::Left(Remainder {
            split: next.split(request),
            id,
            token,
            from: 0,
            end,
            is_work_of_layers,
        })
    }

    /// Makes a piece, which waited for `waited_ns` nanoseconds since its request came.
    pub(super) fn make(
        &mut self,
        piece: &Piece,
        waited_ns: u64,
        next: &mut Crossing<'_>,
    ) -> Box<Request> {
        if let Some(parent) = self.0.get_mut(&piece.id).filter(|_| piece.from == 0) {
            parent.held_ns = waited_ns;
        }
        let mut request = next.piece(piece.split, piece.from, piece.length);
        request.token = piece.token;
        if piece.is_last {
            next.join(piece.split);
        }
        request
    }

    /// The front end takes back what is left of a request, whose pieces in flight complete.
    pub(super) fn withdraw(&mut self, rest: &Remainder, next: &mut Crossing<'_>) {
        if let Some(parent) = self.0.get_mut(&rest.id) {
            parent.is_withdrawn = true;
        }
        next.join(rest.split);
    }

    /// All pieces of a request have returned.
    pub(super) fn end(&mut self, id: u64, outcome: Outcome, course: &mut Course) -> Outcome {
        let parent = self.0.remove(&id).unwrap_or_default();
        if parent.held_ns > 0 {
            course.hold(HeldBy::Schedule, parent.held_ns);
        }
        if parent.is_withdrawn { outcome.and(Err(ErrorKind::Withdrawn)) } else { outcome }
    }
}
